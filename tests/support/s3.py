"""A local S3 server (moto) in the test process."""

import importlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from support.tools import missing

BUCKET = "bucket"


@contextmanager
def serving_bucket(objects: Mapping[str, bytes]) -> Iterator[Any]:
    """Serve a bucket for the duration of a block; yields a boto3 client.

    Sets address and credentials in the environment, as an operator would.
    """
    try:
        moto: Any = importlib.import_module("moto.server")
        importlib.import_module("s3fs")
        boto3: Any = importlib.import_module("boto3")
    except ImportError as error:
        missing(f"{error.name} is not installed")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for name, content in objects.items():
            client.upload_fileobj(io.BytesIO(content), BUCKET, name)
        yield client
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
