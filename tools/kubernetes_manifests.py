"""Write the manifests of deploy/kubernetes from the chart, or prove that they are fresh.

    python tools/kubernetes_manifests.py [--check] [--helm PROGRAM]

The chart is the only description of the deployment; users without helm apply a generated file.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "xlaserve"
FOLDER = ROOT / "deploy" / "kubernetes"
FILE = FOLDER / "xlaserve.yaml"
POOL = FOLDER / "inference-pool.yaml"
MADE_OF: Mapping[Path, Path] = MappingProxyType(
    {FILE: FOLDER / "values.yaml", POOL: FOLDER / "inference-pool-values.yaml"}
)
"""Generated files and the values they are rendered with."""
KUBERNETES = "1.33.0"
"""Kubernetes version that manifests are validated against."""
_INTRODUCTION = """# Made by tools/kubernetes_manifests.py from deploy/helm and {values} here.
#
#   kubectl apply -f deploy/kubernetes/{file}
#
# The PersistentVolumeClaim `models` has to be there, with the model repository. {needs}
"""
_NEEDS: Mapping[Path, str] = MappingProxyType(
    {
        FILE: "The autoscaler needs\n"
        "# an adapter that offers metrics of Prometheus, the PodMonitor the Prometheus operator.",
        POOL: "The pool needs\n"
        "# the Gateway API's inference extension, and a picker with endpoint-picker.yaml of here.",
    }
)


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


def page(helm: str, file: Path = FILE) -> str:
    """Return a whole manifest file, without the labels that helm adds."""
    values = MADE_OF[file]
    text = rendered(helm, values).replace("managed-by: Helm", "managed-by: kubectl")
    lines = [line for line in text.splitlines() if not line.startswith("# Source: ")]
    head = _INTRODUCTION.format(values=values.name, file=file.name, needs=_NEEDS[file])
    return head + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    parser.add_argument("--helm", default="helm", help="the program")
    given = parser.parse_args()
    stale = []
    for file in MADE_OF:
        text = page(given.helm, file)
        if not given.check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            stale.append(file)
    for file in stale:
        print(f"{file.relative_to(ROOT)} is stale: run tools/kubernetes_manifests.py")
    if given.check and not stale:
        print("the manifests in deploy/kubernetes are fresh")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
