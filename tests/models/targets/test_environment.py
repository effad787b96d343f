from xlaserve.offline.targets import environment
from xlaserve.runtime.devices.target_kinds import named

_SERVER = {
    "PATH": "/bin",
    "XLASERVE_DEVICE": "cuda",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    "JAX_PLATFORMS": "cuda",
    "JAX_ENABLE_X64": "0",
    "CUDA_VISIBLE_DEVICES": "0",
}


def test_a_compiler_for_a_gpu_finds_none_and_needs_none() -> None:
    found = environment.of(named("h100"), inherited=_SERVER)

    assert ("1", "-1") == (found["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"], found["CUDA_VISIBLE_DEVICES"])
    assert "--xla_gpu_autotune_level=0" in found["XLA_FLAGS"]


def test_what_is_said_to_a_server_is_not_handed_down() -> None:
    found = environment.of(named("v5e"), inherited=_SERVER)

    assert ("/bin", "cpu", "") == (found["PATH"], found["JAX_PLATFORMS"], found["XLA_FLAGS"])
    assert not {"XLASERVE_DEVICE", "JAX_ENABLE_X64"} & set(found)


def test_the_cpu_plays_as_many_devices_as_there_are_to_be() -> None:
    found = environment.of(named("cpu"), 4, ("--xla_cpu_use_thunk_runtime=true",), {})

    assert (
        "--xla_force_host_platform_device_count=4 --xla_cpu_use_thunk_runtime=true"
        == found["XLA_FLAGS"]
    )
