"""Metadata of one model for `models show` and `top`."""

from dataclasses import asdict

from xlaserve.dialing.interface import CallFailed, Json, ServerClient


async def model_facts(client: ServerClient, name: str, version: str) -> Json:
    """Return metadata, versions and configuration.

    Versions or configuration are empty if the server lacks the extension that returns them.
    """
    metadata = await client.describe(name, version)
    found: Json = {"metadata": metadata, "versions": [], "configuration": None}
    for key, asking in (
        ("versions", _versions(client, name)),
        ("configuration", client.configuration(name, version)),
    ):
        try:
            found[key] = await asking
        except Exception as error:  # the server does not have the extension
            if not isinstance(error, CallFailed) and client.failure(error) is None:
                raise
    return found


async def _versions(client: ServerClient, name: str) -> list[Json]:
    return [asdict(entry) for entry in await client.index() if entry.name == name]
