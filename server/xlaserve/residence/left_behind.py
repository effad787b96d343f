"""Counts the state that a server cannot hand to its replacement."""

from collections.abc import Mapping

from xlaserve.concurrency.control_plane import LEFT_BEHIND, ControlPlane
from xlaserve.residence.registry import Registry
from xlaserve.serving.inputs.cuda_regions import KIND
from xlaserve.serving.inputs.shared_memory import Regions
from xlaserve.serving.response_cache import ResponseCache
from xlaserve.serving.stations.sequences.sequences import Sequences


def answer_left_behind(
    plane: ControlPlane, registry: Registry, regions: Regions, cache: ResponseCache | None
) -> None:
    """Make this process report, when asked, the state that is lost when it exits."""

    async def reply(_: object) -> Mapping[str, int]:
        return {
            "sequences": sum(
                version.instance.station.in_progress
                for model in registry.models()
                for version in model.versions.values()
                if version.instance is not None and isinstance(version.instance.station, Sequences)
            ),
            "cuda_shared_memory_regions": regions.count(KIND),
            "cached_responses": 0 if cache is None else len(cache),
        }

    plane.answer(LEFT_BEHIND, reply)
