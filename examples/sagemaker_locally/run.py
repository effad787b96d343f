"""Follow the contract of a SageMaker multi-model endpoint on this machine; see README.md."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from serving import served, stay

from xlaserve import export_model

SECONDS = 100


def ask(method: str, url: str, body: str = "", kind: str = "application/json") -> tuple[int, str]:
    """Return status and body of an answer, including error answers."""
    asked = Request(url, body.encode() or None, {"Content-Type": kind}, method=method)
    try:
        with urlopen(asked, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def main() -> None:
    """Send the platform's calls: health check, load, invoke, repeated load, list, unload."""
    with TemporaryDirectory() as folder:
        base = Path(folder, "opt/ml")
        # The platform unpacks archives from S3 to /opt/ml/models/<hash>/model.
        for name, factor in (("double", 2), ("triple", 3)):
            params = np.full((1, 1), factor, np.float32)
            export_model(
                lambda params, x: x * params,
                params,
                {"x": ("FP32", [-1, 3])},
                base / "models" / name / "model/1",
                outputs=["y"],
                max_batch_size=4,
            )
        variables = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_BASE_DIR": str(base)}
        with served(None, "--sagemaker", **variables) as server:
            models = f"{server.http}/models"
            steps = []

            def do(method: str, url: str, body: str = "", kind: str = "application/json") -> str:
                status, answer = ask(method, url, body, kind)
                shown = url.removeprefix(server.http)
                print(f"{method:6} {shown:24} {status}  {answer[:100]}".rstrip())
                steps.append(status)
                return answer

            do("GET", f"{server.http}/ping")
            for name in ("double", "triple"):
                url = str(base / "models" / name / "model")
                do("POST", models, json.dumps({"model_name": name, "url": url}))
            rows = do("POST", f"{models}/double/invoke", "1,2,3\n4,5,6\n", "text/csv")
            listed = do("POST", f"{models}/triple/invoke", json.dumps({"instances": [[1, 2, 3]]}))
            do("POST", models, json.dumps({"model_name": "double", "url": url}))
            do("GET", models)
            do("DELETE", f"{models}/{quote('double')}")
            do("GET", f"{models}/double")
            stay(server)
            right = json.loads(listed) == {"predictions": [[3.0, 6.0, 9.0]]}
            twice = json.loads(rows)["predictions"] == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]
            if steps != [200, 200, 200, 200, 200, 409, 200, 200, 404] or not (right and twice):
                sys.exit("that is not what was expected")


if __name__ == "__main__":
    main()
