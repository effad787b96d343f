"""Asynchronous dispatch of exported models, with the CPU simulating a GPU."""

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from support.plain_models import load_plain

from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.errors import OutOfMemory
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.exported.outputs import DeviceTensor
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs.program_table import Program, Table
from xlaserve.tensors import Tensor

RULES = json.dumps({"w": [None, "model"]})


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every device as one that computes asynchronously."""
    monkeypatch.setattr(Site, "is_accelerator", True)


def loaded(directory: Path, **parameters: str) -> JaxExportModel:
    return load_plain(directory, LoadContext("m", "1", ModelConfig(parameters=parameters)))


@pytest.fixture
def model(accelerated: None, affine_directory: Path) -> Iterator[JaxExportModel]:
    made = loaded(affine_directory, batch_sizes="1,6")
    yield made
    made.close()


def rows(count: int) -> Tensor:
    return np.random.default_rng(count).random((count, 4), np.float32)


@pytest.mark.parametrize("count", [1, 4, 5, 6])
def test_what_is_dispatched_is_what_is_executed(
    model: JaxExportModel, affine_model: LoadedModel, count: int
) -> None:
    """With and without padding; each execution is fetched separately."""
    flights = [model.dispatch({"x": rows(count)}), model.dispatch({"x": rows(1)})]
    found, other = (flight.fetch()["y"] for flight in flights)
    at_once = model.execute({"x": rows(count)})["y"]
    expected = affine_model.execute({"x": rows(count)})["y"]

    assert (count, 300) == np.shape(found)
    assert (1, 300) == np.shape(other)
    assert np.allclose(np.asarray(expected), np.asarray(found), atol=1e-5)
    assert np.array_equal(np.asarray(at_once), np.asarray(found))


def test_only_accelerators_are_dispatched_to(
    model: JaxExportModel, affine_model: LoadedModel
) -> None:
    assert affine_model.dispatching is None
    assert model.dispatching is model


def test_what_is_on_the_device_goes_on_from_there(model: JaxExportModel) -> None:
    """An output that stays, with the padding of its bucket."""
    flight = model.dispatch({"x": rows(5)}, resident=True)
    found = flight.fetch()["y"]

    assert isinstance(found, DeviceTensor)
    assert (5, (6, 300)) == (found.rows, found.array.shape)
    assert np.array_equal(np.asarray(model.execute({"x": rows(5)})["y"]), found.numpy())


# --- what a device does, told by outputs that note it ------------------------------------------


class Output:
    """An array on a device that has not computed it yet."""

    def __init__(self, log: list[str], problem: Exception | None = None) -> None:
        self._log = log
        self._problem = problem

    def copy_to_host_async(self) -> None:
        self._log.append("copy")

    def __array__(self, dtype: object = None, copy: object = None) -> Tensor:
        self._log.append("fetch")
        if self._problem is not None:
            raise self._problem
        return np.zeros((1, 300), np.float32)


def computing(model: JaxExportModel, *outputs: Output) -> None:
    """Make every program of a model return these outputs, ignoring its arguments."""
    (copy,) = model._copies

    def call(leaves: object, arguments: object) -> list[Output]:
        return list(outputs)

    made: list[Program] = [replace(one, call=call) for one in copy.table.programs]  # type: ignore[arg-type]
    copy.table = Table(copy.table.buckets, tuple(made))


def test_copies_to_the_host_are_under_way_before_the_first_is_waited_for(
    model: JaxExportModel,
) -> None:
    log: list[str] = []
    model._output_names = ("y", "z")
    computing(model, Output(log), Output(log))
    flight = model.dispatch({"x": rows(1)})
    dispatched = list(log)
    flight.fetch()

    assert ["copy", "copy"] == dispatched
    assert ["copy", "copy", "fetch", "fetch"] == log


@pytest.mark.parametrize("count", [1, 5])
def test_inputs_live_until_they_are_fetched(model: JaxExportModel, count: int) -> None:
    """The copy to the device is asynchronous."""
    computing(model, Output([]))
    data = rows(count)
    flight = model.dispatch({"x": data})
    watched = weakref.ref(flight.arguments[0])
    del data
    gc.collect()
    before = watched()
    assert before is not None
    del before
    flight.fetch()

    assert watched() is None


@pytest.mark.parametrize("text", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: no such luck"])
def test_an_error_that_comes_late_is_out_of_memory_or_passes(
    model: JaxExportModel, text: str
) -> None:
    output = Output([], jax.errors.JaxRuntimeError(text))
    computing(model, output)
    flight = model.dispatch({"x": rows(1)})
    expected = OutOfMemory if "EXHAUSTED" in text else jax.errors.JaxRuntimeError

    with pytest.raises(expected, match=text):
        flight.fetch()
    with pytest.raises(expected, match=text):
        DeviceTensor(output, None, "m").numpy()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: no such luck"])
def test_an_error_of_the_dispatch_is_out_of_memory_or_passes(
    model: JaxExportModel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(Table, "program_for", fail)
    expected = OutOfMemory if "EXHAUSTED" in text else jax.errors.JaxRuntimeError

    with pytest.raises(expected, match=text):
        model.dispatch({"x": rows(1)})


# --- where, and in what memory -----------------------------------------------------------------


def test_memory_is_booked_for_all_that_may_be_in_flight(
    model: JaxExportModel, affine_model: LoadedModel
) -> None:
    of_host, of_device = affine_model.info.memory, model.info.memory

    assert IN_FLIGHT * of_host.temporaries_bytes == of_device.temporaries_bytes
    assert of_host.parameters_bytes == of_device.parameters_bytes
    assert sum(of_device.per_device.values()) == of_device.total_bytes


@pytest.mark.parametrize(
    ("parameters", "queues"),
    [
        ({}, ("cpu:0",)),
        ({"devices": "all"}, ("cpu:0", "cpu:1")),
        ({"devices": "1"}, ("cpu:1",)),
        # Two that are sharded over the same devices may wait for one another on each of them.
        ({"devices": "all", "placement": "shard", "partition": RULES}, ("cpu:meshes",)),
    ],
)
def test_each_device_has_a_line_and_all_that_is_sharded_has_one(
    accelerated: None, affine_directory: Path, parameters: dict[str, str], queues: tuple[str, ...]
) -> None:
    model = loaded(affine_directory, batch_sizes="6", **parameters)
    outputs = [
        model.dispatch({"x": rows(2)}, replica=replica).fetch()["y"]
        for replica in range(model.replicas)
    ]
    model.close()

    assert queues == model.queues
    assert [(2, 300)] * len(queues) == [np.shape(output) for output in outputs]
