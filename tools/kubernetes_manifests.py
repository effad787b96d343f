"""Write deploy/kubernetes/xlaserve.yaml from the chart, or prove that it is fresh (`--check`).

    python tools/kubernetes_manifests.py [--check] [--helm PROGRAM]

There is one description of the deployment, the chart; who has no helm applies the file.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "xlaserve"
FOLDER = ROOT / "deploy" / "kubernetes"
FILE = FOLDER / "xlaserve.yaml"
KUBERNETES = "1.33.0"
"""Version of the API that manifests are checked with."""
_INTRODUCTION = """# Made by tools/kubernetes_manifests.py from deploy/helm and values.yaml here.
#
#   kubectl apply -f deploy/kubernetes/xlaserve.yaml
#
# The PersistentVolumeClaim `models` has to be there, with the model repository. The autoscaler
# needs an adapter that offers metrics of Prometheus, the PodMonitor the Prometheus operator.
"""


def rendered(helm: str, values: Path = FOLDER / "values.yaml", *options: str) -> str:
    """Return the manifests of the chart with these values; raises CalledProcessError."""
    command = [helm, "template", "xlaserve", str(CHART), "--values", str(values)]
    done = subprocess.run(
        [*command, f"--kube-version={KUBERNETES}", *options],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def page(helm: str) -> str:
    """Return the whole file: as one would write it, without the marks of helm."""
    text = rendered(helm).replace("managed-by: Helm", "managed-by: kubectl")
    lines = [line for line in text.splitlines() if not line.startswith("# Source: ")]
    return _INTRODUCTION + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    parser.add_argument("--helm", default="helm", help="the program")
    given = parser.parse_args()
    if not given.check:
        FILE.write_text(page(given.helm))
        return 0
    if FILE.read_text() == page(given.helm):
        print("deploy/kubernetes/xlaserve.yaml is fresh")
        return 0
    print("deploy/kubernetes/xlaserve.yaml is stale: run tools/kubernetes_manifests.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
