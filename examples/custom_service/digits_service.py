"""A custom gRPC service in front of the `digits` model.

    xlaserve serve examples/models --service examples/custom_service/digits_service.py:create

It takes encoded pictures instead of tensors. It needs no knowledge of ModelMesh: behind a mesh, the
server writes the model's id into each request before the service sees it.
"""

import io
from pathlib import Path

import numpy as np
from digits_proto.example.digits import DigitsBase, ReadRequest, ReadResponse
from PIL import Image, UnidentifiedImageError

from xlaserve import Models, Service
from xlaserve.errors import InvalidRequest

DESCRIPTOR_SET = Path(__file__).parent / "digits_proto" / "descriptor_set.binpb"
LARGEST_SIDE = 4096


class Digits(DigitsBase):
    """Implements `example.digits.Digits`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def read(self, read_request: ReadRequest) -> ReadResponse:
        """Decode the picture, run the model, and name the likeliest digit."""
        model_id = read_request.model.id
        image = read_picture(read_request.picture.data)
        outputs = await self._models.infer(model_id, {"image": image[np.newaxis]})
        probabilities = outputs["probabilities"][0]
        digit = int(probabilities.argmax())
        return ReadResponse(digit=digit, probability=float(probabilities[digit]), model_id=model_id)


def read_picture(data: bytes) -> np.ndarray:
    """Return a picture as the model expects it: 8x8 values from 0 to 1."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if max(picture.size) > LARGEST_SIDE:
                raise InvalidRequest(f"the picture is larger than {LARGEST_SIDE} pixels")
            small = picture.convert("L").resize((8, 8), Image.Resampling.BOX)
    except (OSError, UnidentifiedImageError) as error:
        raise InvalidRequest(f"the picture cannot be read: {error}") from error
    return np.asarray(small, np.float32) / 255


def create(models: Models) -> Service:
    """Create the service; `--service` names this function."""
    return Service(
        handler=Digits(models),
        descriptor_set=DESCRIPTOR_SET.read_bytes(),
        id_paths={"example.digits.Digits/Read": (2, 1)},
    )
