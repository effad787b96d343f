"""CUDA memory of other processes, with a fake driver: errors, limits, and closing."""

import gc

import numpy as np
import pytest
from support.fake_cuda import FakeCuda

from xlaserve.errors import (
    InvalidRegion,
    NotLocal,
    RegionExists,
    RegionNotFound,
    SwitchedOff,
    TooManyRegions,
    Unsupported,
)
from xlaserve.runtime.devices.cuda_driver import CudaDriver, CudaFailure, open_driver
from xlaserve.serving.call import NOBODY, Call, Peer
from xlaserve.serving.inference import InferRequest, SharedInput
from xlaserve.serving.inputs.cuda_regions import CLIENT_FAULTS, CudaRegions
from xlaserve.serving.inputs.shared_memory import Regions, SharedMemoryPolicy
from xlaserve.serving.inputs.shared_tensors import REGION, SharedInputs
from xlaserve.settings.choices import SharedMemoryClients
from xlaserve.tensors import DATATYPES, Parameter


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def regions_on(cuda: FakeCuda, **policy: int | bool | SharedMemoryClients) -> Regions:
    regions = Regions(SharedMemoryPolicy(**policy))  # type: ignore[arg-type]
    regions.driver = CudaDriver(cuda)
    return regions


def test_memory_is_read_and_written_where_it_is_and_within_its_region(cuda: FakeCuda) -> None:
    regions = regions_on(cuda)
    handle = cuda.share(64, 7)
    CudaRegions(regions).register(NOBODY, "r", handle, 1, 32)
    region = regions.find(NOBODY, "r")
    found = np.zeros(4, np.uint8)
    region.read(28, found)
    region.write(8, [b"ab", memoryview(b"c"), b""])

    assert [7] * 4 == found.tolist()
    assert b"\7abc\7" == cuda.memory[handle][7:12].tobytes()
    for offset, size in ((29, 4), (0, 33)):
        with pytest.raises(InvalidRegion, match=f"{size} bytes at {offset}"):
            region.read(offset, np.zeros(size, np.uint8))
        with pytest.raises(InvalidRegion, match=f"{size} bytes at {offset}"):
            region.write(offset, [b"x" * size])
    assert [] == cuda.stack
    assert "cuCtxSynchronize" in cuda.calls


@pytest.mark.parametrize(
    ("handle", "device", "size", "text"),
    [
        (b"short", 0, 8, "a raw_handle of 64 bytes .cudaIpcMemHandle_t., got 5"),
        (b"\7" * 64, 2, 8, "a device_id of 0 to 1, got 2"),
        (b"\7" * 64, -1, 8, "a device_id of 0 to 1, got -1"),
        (b"\1" * 64, 0, 8, "is still allocated, got CUDA_ERROR_INVALID_HANDLE"),
        (b"\7" * 64, 0, 17, "17 bytes of CUDA memory, got 16"),
        (b"\7" * 64, 0, 0, "a byte_size of 1 or more"),
        (b"\7" * 64, 0, 1 << 63, "a byte_size of 0 to"),
    ],
)
def test_what_cannot_be_opened_is_refused_and_nothing_stays_open(
    cuda: FakeCuda, handle: bytes, device: int, size: int, text: str
) -> None:
    cuda.share(16, 7)
    regions = regions_on(cuda)
    with pytest.raises(InvalidRegion, match=text):
        CudaRegions(regions).register(NOBODY, "r", handle, device, size)
    gc.collect()

    assert ({}, []) == (cuda.opened, CudaRegions(regions).status())
    assert [] == cuda.stack


@pytest.mark.parametrize("code", sorted(CLIENT_FAULTS))
def test_errors_of_handles_are_the_clients_and_others_the_servers(
    cuda: FakeCuda, code: int
) -> None:
    handle = cuda.share(16, 7)
    table = CudaRegions(regions_on(cuda))
    cuda.failing["cuIpcOpenMemHandle_v2"] = code
    with pytest.raises(InvalidRegion, match=CLIENT_FAULTS[code]):
        table.register(NOBODY, "r", handle, 0, 16)
    cuda.failing["cuIpcOpenMemHandle_v2"] = 999
    with pytest.raises(CudaFailure, match=r"cuIpcOpenMemHandle_v2: an unknown error \(999\)"):
        table.register(NOBODY, "r", handle, 0, 16)

    assert [] == cuda.stack


def test_a_size_that_cannot_be_asked_for_closes_what_was_opened(cuda: FakeCuda) -> None:
    handle = cuda.share(16, 7)
    cuda.failing["cuMemGetAddressRange_v2"] = 1
    with pytest.raises(CudaFailure, match="INVALID_VALUE"):
        CudaRegions(regions_on(cuda)).register(NOBODY, "r", handle, 0, 16)
    gc.collect()

    assert {} == cuda.opened


def test_names_and_limits_are_those_of_all_shared_memory(cuda: FakeCuda) -> None:
    regions = regions_on(cuda, max_regions=2, max_bytes=20)
    table = CudaRegions(regions)
    handles = [cuda.share(16, fill) for fill in range(4)]
    table.register(NOBODY, "a", handles[0], 0, 16)
    with pytest.raises(RegionExists):
        table.register(NOBODY, "a", handles[1], 0, 4)
    with pytest.raises(RegionExists):
        regions.register(NOBODY, "a", "/key", 0, 4)
    with pytest.raises(TooManyRegions, match="20 bytes"):
        table.register(NOBODY, "b", handles[1], 0, 5)
    table.register(NOBODY, "b", handles[2], 0, 4)
    with pytest.raises(TooManyRegions, match="2 regions"):
        table.register(NOBODY, "c", handles[3], 0, 1)
    gc.collect()

    assert {handles[0], handles[2]} == set(cuda.opened.values())


def test_status_and_unregistration_are_of_their_own_kind(cuda: FakeCuda) -> None:
    regions = regions_on(cuda)
    table = CudaRegions(regions)
    table.register(NOBODY, "a", cuda.share(16, 1), 1, 16)
    table.register(NOBODY, "b", cuda.share(8, 2), 0, 8)

    assert [("a", 1, 16), ("b", 0, 8)] == [(r.name, r.device, r.byte_size) for r in table.status()]
    assert ["b"] == [r.name for r in table.status("b")]
    assert [] == regions.status()
    with pytest.raises(RegionNotFound, match="system"):
        regions.status("a")
    regions.unregister(NOBODY)
    regions.unregister(NOBODY, "a")
    assert 2 == len(cuda.opened)
    table.unregister(NOBODY, "a")
    table.unregister(NOBODY, "a")
    with pytest.raises(RegionNotFound, match="cuda"):
        table.status("a")
    with pytest.raises(InvalidRegion, match="none with this name"):
        regions.find(NOBODY, "a")
    table.unregister(NOBODY)
    assert ({}, []) == (cuda.opened, table.status())


def test_memory_is_closed_once_behind_the_last_request_that_has_it(cuda: FakeCuda) -> None:
    regions = regions_on(cuda)
    table = CudaRegions(regions)
    table.register(NOBODY, "r", cuda.share(16, 5), 0, 16)
    request = InferRequest("m", inputs=(input_of("r", 16),))
    begun = SharedInputs(request, regions, Call())
    table.unregister(NOBODY, "r")

    assert 1 == len(cuda.opened)
    assert [5] * 16 == begun.read().inputs[0].data.tolist()
    del begun
    assert {} == cuda.opened
    regions.close()
    assert 1 == cuda.calls.count("cuIpcCloseMemHandle")


def test_the_end_of_the_server_closes_what_is_registered(cuda: FakeCuda) -> None:
    regions = regions_on(cuda)
    CudaRegions(regions).register(NOBODY, "r", cuda.share(16, 5), 0, 16)
    regions.close()

    assert {} == cuda.opened


def test_inputs_are_copied_even_where_system_memory_is_read_in_place(cuda: FakeCuda) -> None:
    regions = regions_on(cuda, in_place=True)
    CudaRegions(regions).register(NOBODY, "r", cuda.share(16, 3), 0, 16)
    request = InferRequest("m", inputs=(input_of("r", 16),))
    inputs = SharedInputs(request, regions, Call())

    assert (False, 16) == (inputs.has_views, inputs.copied_bytes)
    assert [3] * 16 == inputs.read().inputs[0].data.tolist()


def input_of(region: str, size: int) -> SharedInput:
    parameters: dict[str, Parameter] = {REGION: region, "shared_memory_byte_size": size}
    empty = np.zeros(0, np.uint8)
    return SharedInput("x", DATATYPES["UINT8"], empty, parameters, (size,))


def test_only_clients_who_may_share_memory_share_that_of_devices(cuda: FakeCuda) -> None:
    handle = cuda.share(16, 7)
    remote = Peer("grpc_endpoint", "10.0.0.7:1")
    with pytest.raises(NotLocal):
        CudaRegions(regions_on(cuda)).register(remote, "r", handle, 0, 16)
    off = regions_on(cuda, clients=SharedMemoryClients.NONE)
    with pytest.raises(SwitchedOff):
        CudaRegions(off).register(NOBODY, "r", handle, 0, 16)

    assert () == off.extensions
    assert ("cuda_shared_memory",) == regions_on(cuda).extensions


def test_without_cuda_nothing_is_registered() -> None:
    regions = Regions()
    table = CudaRegions(regions)
    with pytest.raises(Unsupported, match="CUDA shared memory is not implemented"):
        table.register(NOBODY, "r", b"", 0, 0)
    table.unregister(NOBODY, "r")

    assert ([], ()) == (table.status(), regions.extensions)


def test_a_machine_without_a_driver_that_works_has_none(cuda: FakeCuda) -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    broken = FakeCuda()
    broken.failing["cuInit"] = 100

    assert open_driver(missing) is None
    assert open_driver(lambda name: broken) is None
    found = open_driver(lambda name: cuda)
    assert found is not None
    assert 2 == found.device_count
