"""Drop a model into a running server, then an image onto the model; see README.md."""

import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from serving import served, stay

from xlaserve.client import Client

DIGITS, SEVEN = HERE.parent / "models" / "digits", HERE.parent / "data" / "seven.png"
LOAD_SECONDS = 100


def is_ready(url: str) -> bool:
    """Tell whether a model is ready."""
    try:
        urlopen(f"{url}/ready", timeout=60).close()
    except OSError:  # a missing model has an error status
        return False
    return True


def main() -> None:
    """Copy the model into the repository of a running server, then send an image to it."""
    with TemporaryDirectory() as folder:
        models = Path(folder, "models")
        models.mkdir()
        polling = ("--model-control-mode", "poll", "--poll-interval-seconds", "0.5")
        with served(models, *polling) as server:
            # Rename atomically: the server might find a directory that is still being copied.
            shutil.copytree(DIGITS, Path(folder, "digits"))
            Path(folder, "digits").rename(models / "digits")
            url, end = f"{server.http}/v2/models/digits", time.monotonic() + LOAD_SECONDS
            while not is_ready(url):
                if time.monotonic() > end:
                    sys.exit("the model was not loaded")
                time.sleep(0.2)
            print("digits was dropped into the repository, and is ready")
            picture = SEVEN.read_bytes()
            with Client(server.grpc) as client:
                answer = client.infer("digits", {"image": np.array([picture], object)})
            scores = answer["probabilities"][0]
            best = int(scores.argmax())
            print(f"{SEVEN.name} shows a {best}, with {scores[best]:.1%}")
            print("in the browser: --stay, the page of the model, and drop a picture on its input")
            stay(server)
            if best != 7:
                sys.exit("that is not what was expected")


if __name__ == "__main__":
    main()
