"""Send a picture to the service of `digits_service.py`.

python examples/custom_service/client.py examples/data/seven.png [HOST:PORT]
"""

import asyncio
import sys
from pathlib import Path

from digits_proto.example.digits import DigitsStub, Model, Picture, ReadRequest
from grpclib.client import Channel


async def main(picture: bytes, address: str = "127.0.0.1:8001") -> None:
    """Send one picture and print the answer."""
    host, port = address.split(":")
    async with Channel(host, int(port)) as channel:
        request = ReadRequest(picture=Picture(data=picture), model=Model(id="digits"))
        answer = await DigitsStub(channel).read(request)
    print(f"{answer.digit} ({answer.probability:.1%}), says {answer.model_id}")


asyncio.run(main(Path(sys.argv[1]).read_bytes(), *sys.argv[2:]))
