"""Encoded images as inputs: the tensor that a model gets, and what is refused early."""

import asyncio
import io
import json
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.core import AddModel, Core, MakeCore, World

from xlaserve.errors import (
    BudgetExhausted,
    DuplicateTensor,
    InvalidParameter,
    InvalidRequest,
    InvalidTensor,
    MissingInputs,
    OutOfMemory,
    Overloaded,
)
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json
from xlaserve.net.ledger import Account, Ledger
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.call import Peer
from xlaserve.serving.checks import check_inputs
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.inputs.image_files import DEFAULT_LIMITS, ImageLimits
from xlaserve.serving.inputs.image_form import Form
from xlaserve.serving.inputs.images import EncodedImages, find_images, unpack_bytes_or_image
from xlaserve.tensors import BYTES, DATATYPES, Tensor, TensorDataError, TensorSpec, pack_bytes

RGB = [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [10, 20, 30]]]
GREY = [[0, 100], [200, 255]]
NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})


def file(pixels: object, format: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(data, format)
    return data.getvalue()


def plain(size: int, level: int = 7) -> bytes:
    """Make a square of one gray level."""
    return file(np.full((size, size), level))


def elements(*files: bytes, shape: tuple[int, ...] | None = None) -> Tensor:
    array = np.empty(len(files), object)
    array[:] = files
    return array.reshape(shape or (len(files),))


def request(data: Tensor, *more: InferInput) -> InferRequest:
    return InferRequest("m", inputs=(InferInput("x", BYTES, data), *more))


def info(shape: tuple[int, ...], datatype: str = "FP32", rows: int = 0) -> ModelInfo:
    return ModelInfo("test", (TensorSpec("x", DATATYPES[datatype], shape),), (), rows)


def decoded(
    model: ModelInfo,
    data: Tensor,
    limits: ImageLimits = DEFAULT_LIMITS,
    parameters: Mapping[str, str] = NO_PARAMETERS,
) -> Any:
    asked = request(data)
    images = find_images(asked, model, ModelConfig(parameters=parameters), limits)
    check_inputs("m", model, images.promised() if images else asked)
    assert images is not None
    return images.decode()["x"]


# --- shapes ---


@pytest.mark.parametrize(
    ("shape", "files", "asked", "expected"),
    [
        ((-1, 2, 2), 1, None, (1, 2, 2)),
        ((-1, 2, 2), 3, None, (3, 2, 2)),
        ((3, 2, 2), 3, None, (3, 2, 2)),
        ((-1, 4, 3, 1), 2, None, (2, 4, 3, 1)),
        ((-1, 4, 3, 3), 2, None, (2, 4, 3, 3)),
        ((-1, 4, 3, 4), 2, None, (2, 4, 3, 4)),
        ((-1, 3, 4, 3, 3), 6, (2, 3), (2, 3, 4, 3, 3)),
        ((-1, 1, 4, 3, 3), 1, None, (1, 1, 4, 3, 3)),
        ((-1, -1, -1, 3), 2, None, (2, 5, 5, 3)),
        ((-1, -1, 9, 3), 2, None, (2, 5, 9, 3)),
        ((-1, 2, -1), 2, None, (2, 2, 5)),
    ],
)
def test_every_element_is_one_image(
    shape: tuple[int, ...],
    files: int,
    asked: tuple[int, ...] | None,
    expected: tuple[int, ...],
) -> None:
    """[N,H,W,C] and [D,N,H,W,C] as in OVMS, and gray images for [N,H,W]; variable sizes stay."""
    data = elements(*(plain(5, level) for level in range(files)), shape=asked)
    found = decoded(info(shape), data)
    levels = found.reshape(files, -1)

    assert (expected, np.float32) == (found.shape, found.dtype)
    assert list(range(files)) == levels.min(axis=1).tolist()


def test_what_is_promised_is_what_is_decoded() -> None:
    """The predicted shape takes no memory, so that it can be checked first."""
    asked = request(elements(plain(5), plain(5)))
    images = find_images(asked, info((-1, 3, 3, 3), "FP16"), ModelConfig(), DEFAULT_LIMITS)
    assert images is not None
    promised, found = images.promised().inputs[0], images.decode()["x"]

    assert (promised.data.shape, promised.data.dtype) == (found.shape, found.dtype)
    assert DATATYPES["FP16"] is promised.datatype
    assert {0} == set(promised.data.strides)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (info((-1, 2, 2), "BYTES"), elements(plain(2))),
        (info((-1, 2, 2), "BOOL"), elements(plain(2))),
        (info((-1, 2)), elements(plain(2))),
        (info((-1, 1, 1, 2, 2, 3)), elements(plain(2))),
        (info((2, 2, 2)), elements(plain(2))),
        (info((-1, 2, 2)), elements(plain(2), shape=(1, 1))),
        (info((-1, 2, 2)), elements()),
        (info((-1, 2, 3, 3, 3)), elements(plain(2), plain(2))),
    ],
)
def test_other_bytes_are_not_images(model: ModelInfo, data: Tensor) -> None:
    assert find_images(request(data), model, ModelConfig(), DEFAULT_LIMITS) is None


def test_other_datatypes_are_not_looked_at() -> None:
    asked = InferRequest("m", inputs=(InferInput("x", DATATYPES["UINT8"], np.zeros((1, 2, 2))),))

    assert find_images(asked, info((-1, 2, 2)), ModelConfig(), DEFAULT_LIMITS) is None


# --- values ---


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("BYTES", "BOOL")])
def test_values_go_from_0_to_255_in_the_datatype_of_the_model(datatype: str) -> None:
    found = decoded(info((-1, 2, 2), datatype), elements(file(GREY)))
    expected = np.minimum(GREY, 127 if datatype == "INT8" else 255)

    assert DATATYPES[datatype].dtype == found.dtype
    assert expected.tolist() == found[0].astype(int).tolist()


@pytest.mark.parametrize(
    ("parameters", "shape", "expected"),
    [
        ({}, (-1, 2, 2, 3), RGB),
        ({"image_channel_order": "RGB"}, (-1, 2, 2, 3), RGB),
        ({"image_channel_order": "BGR"}, (-1, 2, 2, 3), np.asarray(RGB)[..., ::-1]),
        (
            {"image_channel_order": "BGR"},
            (-1, 2, 2, 4),
            np.insert(np.asarray(RGB)[..., ::-1], 3, 255, axis=2),
        ),
        ({"image_channel_order": "BGR"}, (-1, 2, 2, 1), np.reshape([76, 150, 29, 18], (2, 2, 1))),
        ({"image_scale": "2"}, (-1, 2, 2, 3), np.asarray(RGB) * 2),
        ({"image_scale": "-0.5"}, (-1, 2, 2, 3), np.asarray(RGB) * -0.5),
    ],
)
def test_the_configuration_says_the_order_of_channels_and_the_scale(
    parameters: dict[str, str], shape: tuple[int, ...], expected: Any
) -> None:
    found = decoded(info(shape), elements(file(RGB)), parameters=parameters)

    assert np.array_equal(np.asarray(expected, np.float32), found[0])


@pytest.mark.parametrize(
    ("datatype", "scale", "expected"),
    [
        ("UINT8", "2", [[0, 200], [255, 255]]),
        ("UINT8", "-1", [[0, 0], [0, 0]]),
        ("INT8", "0.016", [[0, 2], [3, 4]]),
        ("INT64", "1e300", [[0, 2**53], [2**53, 2**53]]),
    ],
)
def test_integers_are_rounded_and_kept_in_range(
    datatype: str, scale: str, expected: list[list[int]]
) -> None:
    found = decoded(
        info((-1, 2, 2), datatype), elements(file(GREY)), parameters={"image_scale": scale}
    )

    assert expected == found[0].tolist()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("image_channel_order", "rgb", "expected RGB or BGR, got 'rgb' in the configuration of"),
        ("image_channel_order", "", "expected RGB or BGR, got ''"),
        ("image_mean", "1,2", "expected 1 number, got '1,2'"),
        ("image_mean", "nan", "keeps pixels finite in FP16, got 'nan'"),
        ("image_std", "0", "keeps pixels finite in FP16, got '0'"),
        ("image_resize", "fill", "expected stretch or crop or pad, got 'fill'"),
        ("image_sampling", "cubic", "expected bilinear or nearest or box"),
        ("image_orientation", "up", "expected exif or ignore, got 'up'"),
        ("image_pad", "256", "expected a number from 0 to 255, got '256'"),
        ("image_pad", "-1", "expected a number from 0 to 255, got '-1'"),
        ("image_resize_to", "99999", "expected a number from 0 to 16384, got '99999'"),
        ("image_scale", "", "expected a number, got ''"),
        ("image_scale", "1/255", "expected a number, got '1/255' in the configuration of model"),
        ("image_scale", "nan", "keeps pixels finite in FP16, got 'nan'"),
        ("image_scale", "inf", "keeps pixels finite in FP16"),
        ("image_scale", "1e308", "keeps pixels finite in FP16"),
        ("image_scale", "300", "keeps pixels finite in FP16, got '300'"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_named(name: str, value: str, text: str) -> None:
    with pytest.raises(InvalidParameter, match=f"parameter '{name}': .*{text}"):
        decoded(info((-1, 2, 2), "FP16"), elements(plain(2)), parameters={name: value})


# --- refusals ---


@pytest.mark.parametrize(
    ("shape", "data", "expected", "got"),
    [
        ((-1, 2, 2), elements(b"x"), "a JPEG or PNG image as element 0", "other data"),
        ((-1, 2, 2), elements(plain(2), b""), "a JPEG or PNG image as element 1", "no bytes"),
        (
            (-1, 2, 2, 2, 1),
            elements(plain(2), plain(2), plain(2), plain(2)[:-30], shape=(2, 2)),
            "an image that can be decoded as element 1,1",
            "a broken one:",
        ),
        (
            (-1, -1, 3),
            elements(plain(2), plain(3)),
            "an image of 3x2 pixels like the first as element 1",
            "3x3 pixels",
        ),
        (
            (-1, 5, 8, 8),
            elements(plain(2)),
            "a model with [N,H,W,C] or [N,C,H,W] input and 1, 3 or 4 channels for images",
            "[-1,5,8,8]",
        ),
        (
            (-1, 8, 8, -1),
            elements(plain(2)),
            "a model with [N,H,W,C] or [N,C,H,W] input and 1, 3 or 4 channels for images",
            "one of FP32",
        ),
    ],
)
def test_a_refusal_names_model_and_input_and_element(
    shape: tuple[int, ...], data: Tensor, expected: str, got: str
) -> None:
    with pytest.raises(InvalidTensor) as refused:
        decoded(info(shape), data)

    assert f"model 'm', input 'x': expected {expected}" in str(refused.value)
    assert got in str(refused.value)


def configured(format: str, **parameters: str) -> ModelConfig:
    """Build a configuration as a client writes it."""
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [3, 3, 3], "format": format}
    said = {name: {"string_value": value} for name, value in parameters.items()}
    return parse_json(json.dumps({"input": [tensor], "parameters": said}))


@pytest.mark.parametrize(
    ("shape", "config", "channels_first"),
    [
        ((-1, 3, 2, 2), ModelConfig(), True),
        ((-1, 1, 2, 2), ModelConfig(), True),
        ((2, 1, 3, 2, 2), ModelConfig(), True),
        ((-1, 3, 3, 3), configured("FORMAT_NCHW"), True),
        ((-1, 3, 3, 3), configured("FORMAT_NHWC"), False),
        ((-1, 3, 3, 3), ModelConfig(), False),
        ((-1, 2, 2, 3), ModelConfig(), False),
    ],
)
def test_channels_are_where_the_configuration_or_the_shape_says(
    shape: tuple[int, ...], config: ModelConfig, channels_first: bool
) -> None:
    """A 3x3x3 shape is ambiguous: channels come last unless the configuration says otherwise."""
    sizes = shape[-3:]
    channels = sizes[0] if channels_first else sizes[2]
    small = np.arange(12).reshape(2, 2, 3)
    height, width = sizes[1:] if channels_first else sizes[:2]
    pixels = np.kron(small, np.ones((2, 2, 1))).astype(np.uint8)[:height, :width]
    data = file(pixels if channels == 3 else pixels[..., 0])
    leading = shape[:-3] if len(shape) == 5 else (1,)
    count = int(np.prod(leading))
    asked = request(elements(*[data] * count, shape=leading))
    images = find_images(asked, info(shape), config, DEFAULT_LIMITS)
    assert images is not None
    tensor = images.decode()["x"]
    promised = images.promised().inputs[0]
    plane = tensor.reshape(-1, *sizes)[-1]

    assert tensor.shape == promised.data.shape == (*leading, *sizes)
    seen = np.moveaxis(plane, 0, -1) if channels_first else plane
    assert pixels[..., :channels].astype(float).tolist() == seen.tolist()


def test_channels_that_are_said_to_be_last_are_not_looked_for_elsewhere() -> None:
    asked = request(elements(plain(2)))
    with pytest.raises(InvalidTensor, match=r"got one of FP32\[-1,3,8,8\] FORMAT_NHWC"):
        find_images(asked, info((-1, 3, 8, 8)), configured("FORMAT_NHWC"), DEFAULT_LIMITS)


def test_a_mean_and_a_deviation_are_of_each_channel() -> None:
    """As in torchvision: for values from 0 to 1, red first."""
    numbers = {
        "image_scale": "0.00392156862745098",
        "image_mean": "0.485,0.456,0.406",
        "image_std": "0.229,0.224,0.225",
    }
    expected = (np.asarray(RGB) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    last = decoded(info((-1, 2, 2, 3)), elements(file(RGB)), parameters=numbers)
    first = decoded(info((-1, 3, 2, 2)), elements(file(RGB)), parameters=numbers)
    swapped = {**numbers, "image_channel_order": "BGR"}
    blue = decoded(info((-1, 3, 2, 2)), elements(file(RGB)), parameters=swapped)

    np.testing.assert_allclose(last[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(np.moveaxis(first[0], 0, -1), last[0])
    means, deviations = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for channel in range(3):  # the order of means and deviations is that of the model's channels
        wanted = (np.asarray(RGB)[..., 2 - channel] / 255 - means[channel]) / deviations[channel]
        np.testing.assert_allclose(blue[0][channel], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "data", "error", "text"),
    [
        (info((-1, 2, 2), rows=2), elements(b"x", b"x", b"x"), InvalidTensor, "batch of 1 to 2"),
        (info((-1, 2, 3)), elements(b"x", shape=(1, 1)), InvalidTensor, r"got BYTES\[1,1\]"),
    ],
)
def test_the_number_of_images_is_checked_before_one_is_opened(
    model: ModelInfo, data: Tensor, error: type[InvalidRequest], text: str
) -> None:
    with pytest.raises(error, match=text):
        decoded(model, data)


def test_other_inputs_are_checked_before_an_image_is_opened() -> None:
    model = ModelInfo(
        "test", (*info((-1, 2, 2)).inputs, TensorSpec("y", DATATYPES["FP32"], (1,))), (), 0
    )
    bad = InferInput("x", BYTES, elements(b"x"))
    for asked, error in ((request(bad.data), MissingInputs), (request(bad.data, bad), None)):
        images = find_images(asked, model, ModelConfig(), DEFAULT_LIMITS)
        assert images is not None
        with pytest.raises(error or DuplicateTensor):
            check_inputs("m", model, images.promised())


@pytest.mark.parametrize(
    ("shape", "rows", "refused"),
    [
        ((-1, 8, 8), 4, False),
        ((-1, 8, 8), 0, True),
        ((2, 8, 8), 0, False),
        ((-1, -1, 8), 4, True),
        ((-1, 8, -1), 4, True),
    ],
)
def test_a_tensor_that_the_model_does_not_bound_is_bounded(
    shape: tuple[int, ...], rows: int, refused: bool
) -> None:
    """The default limits apply: here 127 images of 8x8 pixels."""
    try:
        found = decoded(info(shape, rows=rows), elements(plain(8), plain(8)), ImageLimits(999, 127))
    except InvalidTensor as error:
        assert refused
        assert "a tensor of at most 127 pixels (max_image_pixels)" in str(error)
        assert "got 2 images of 8x8 pixels" in str(error)
    else:
        assert not refused
        assert (2, 8, 8) == found.shape


def test_an_image_over_a_limit_is_refused() -> None:
    with pytest.raises(InvalidTensor, match="max_image_bytes.* as element 1"):
        decoded(info((-1, 2, 2)), elements(plain(2), bytes(1000)), ImageLimits(999, 127))


def test_what_the_host_cannot_hold_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(image: object) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(OutOfMemory, match="model 'm': out of memory, decoding .* input 'x'"):
        decoded(info((-1, 2, 2)), elements(plain(2)))


# --- single images without a length ---


@pytest.mark.parametrize("data", [plain(2), file(RGB, "JPEG")])
@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_single_image_needs_no_length(data: bytes, shape: list[int]) -> None:
    expected = elements(data, shape=tuple(shape)).tolist()

    assert expected == unpack_bytes_or_image(shape, data).tolist()
    assert expected == unpack_bytes_or_image(shape, memoryview(data)).tolist()
    assert expected == unpack_bytes_or_image(shape, pack_bytes(elements(data))).tolist()


@pytest.mark.parametrize(
    ("shape", "data"),
    [([2], plain(2)), ([], b"hello"), ([1], b"hello"), ([1], b""), ([0], plain(2)), ([-1], b"")],
)
def test_nothing_else_goes_without_a_length(shape: list[int], data: bytes) -> None:
    with pytest.raises(TensorDataError):
        unpack_bytes_or_image(shape, data)


# --- in the engine ---


async def loaded(core: Core, add_model: AddModel, world: World) -> None:
    """Load a model that adds 1 to its input [N,2,2]."""
    add_model("m", {1: 1})
    await core.control.load("m")
    world.open[0].info = ModelInfo(
        "test", info((-1, 2, 2)).inputs, (TensorSpec("y", DATATYPES["FP32"], (-1, 2, 2)),), 4
    )


async def test_a_request_of_images_is_answered(
    core: Core, add_model: AddModel, world: World
) -> None:
    await loaded(core, add_model, world)
    response = await core.engine.infer(request(elements(plain(2, 1), plain(3, 9))))

    assert [2, 10] == response.outputs[0].data[:, 0, 0].tolist()
    assert (0, 0) == (core.registry.requests, core.registry.resolve("m")[1].users)


async def test_limits_reach_the_engine(core: Core, add_model: AddModel, world: World) -> None:
    await loaded(core, add_model, world)
    engine = Engine(
        core.registry,
        core.gates,
        core.workers.host,
        image_limits=ImageLimits(max_pixels=3),
    )
    with pytest.raises(InvalidTensor, match="at most 3 pixels"):
        await engine.infer(request(elements(plain(2))))


async def test_decoding_is_a_request_in_progress_on_a_thread_of_its_own(
    make_core: MakeCore, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(max_requests_per_model=1)
    await loaded(core, add_model, world)
    threads: list[str] = []
    may_decode = threading.Event()
    decode = EncodedImages.decode

    def held(images: EncodedImages) -> dict[str, Tensor]:
        threads.append(threading.current_thread().name)
        may_decode.wait(10)
        return decode(images)

    monkeypatch.setattr(EncodedImages, "decode", held)
    running = asyncio.create_task(core.engine.infer(request(elements(plain(2)))))
    while not threads:
        await asyncio.sleep(0)

    assert threads[0].startswith("execute")
    assert (1, 1) == (core.registry.requests, core.registry.resolve("m")[1].users)
    with pytest.raises(Overloaded):
        await core.engine.infer(request(elements(plain(2))))

    may_decode.set()

    assert 8 == (await running).outputs[0].data[0, 0, 0]


async def test_what_nobody_waits_for_is_not_decoded_to_its_end(
    core: Core, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loaded(core, add_model, world)
    opened: list[int] = []
    may_decode = threading.Event()
    fill = Form.fill

    def held(form: Form, *given: Any) -> None:
        opened.append(1)
        may_decode.wait(10)
        fill(form, *given)

    monkeypatch.setattr(Form, "fill", held)
    call = AwaitedInfer()
    core.engine.begin(call, request(elements(*[plain(2)] * 4)))
    while not opened:
        await asyncio.sleep(0)
    call.cancel()
    may_decode.set()
    # The pool has a single thread: it has completed the earlier work.
    await core.workers.host.run(lambda: None)
    while core.registry.resolve("m")[1].users:
        await asyncio.sleep(0)

    assert [1] == opened


async def infer_as(core: Core, account: Account, *files: bytes) -> Tensor:
    """Infer as a client whose connection has this account."""
    call = AwaitedInfer(peer=Peer(account=account))
    core.engine.begin(call, request(elements(*files)))
    return (await call.answered()).outputs[0].data


async def test_an_image_counts_for_what_it_becomes(
    core: Core, add_model: AddModel, world: World
) -> None:
    """A file of 3 KB decodes to a megapixel, of which Pillow keeps three copies."""
    await loaded(core, add_model, world)
    ledger = Ledger(32 << 20)
    account, other, peak = ledger.open(), ledger.open(), ledger.watch()
    assert 8 == (await infer_as(core, account, plain(1000)))[0, 0, 0]
    assert 0 == account.held
    assert peak.take() >= 12_000_000

    other.hold(16 << 20)
    with pytest.raises(BudgetExhausted, match="the decoded images of 120000"):
        await infer_as(core, account, plain(1000))
    assert 0 == account.held
    assert 8 == (await infer_as(core, account, plain(100)))[0, 0, 0]
    assert (0, 0) == (core.registry.requests, core.registry.resolve("m")[1].users)


async def test_a_small_image_counts_while_its_call_waits(
    core: Core, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loaded(core, add_model, world)
    ledger = Ledger(32 << 20)
    held: list[int] = []
    begin = Engine._begin_decoded

    def noting(*arguments: Any) -> None:
        held.append(ledger.held)
        begin(*arguments)

    monkeypatch.setattr(Engine, "_begin_decoded", noting)
    await infer_as(core, ledger.open(), plain(100))

    assert [16] == held, "two by two numbers"
    assert 0 == ledger.held
