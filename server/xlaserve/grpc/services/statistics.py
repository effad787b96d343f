"""Conversion of a model version's statistics to the ModelStatistics message."""

from xlaserve.residence.reports.monitor import VersionReport
from xlaserve.runtime.loaded import Bucket
from xlaserve.serving.statistics import BatchStatistics, StatisticDuration, Totals
from xlaserve_proto import inference as pb


def write_statistics(report: VersionReport) -> pb.ModelStatistics:
    """Convert the statistics of one model version."""
    totals = report.totals
    return pb.ModelStatistics(
        name=report.name,
        version=report.version,
        last_inference=totals.last_inference_ms,
        inference_count=totals.inference_count,
        execution_count=totals.execution_count,
        inference_stats=_inference(totals),
        batch_stats=[_batch(batch) for batch in totals.batches],
        memory_usage=[
            pb.MemoryUsage(type=use.kind, id=use.device_id, byte_size=use.size_bytes)
            for use in report.memory
        ],
        compile_stats=[_compiled(bucket) for bucket in report.buckets],
    )


def _inference(totals: Totals) -> pb.InferStatistics:
    return pb.InferStatistics(
        success=_duration(totals.success),
        fail=_duration(totals.fail),
        queue=_duration(totals.queue),
        compute_input=_duration(totals.compute_input),
        compute_infer=_duration(totals.compute_infer),
        compute_output=_duration(totals.compute_output),
        cache_hit=_duration(totals.cache_hit),
        cache_miss=_duration(totals.cache_miss),
    )


def _batch(batch: BatchStatistics) -> pb.InferBatchStatistics:
    return pb.InferBatchStatistics(
        batch_size=batch.batch_size,
        compute_input=_duration(batch.compute_input),
        compute_infer=_duration(batch.compute_infer),
        compute_output=_duration(batch.compute_output),
    )


def _compiled(bucket: Bucket) -> pb.CompileStatistics:
    return pb.CompileStatistics(
        batch_size=bucket.rows,
        sizes=list(bucket.sizes),
        compile_ns=round(bucket.compile_seconds * 1e9),
        execution_ns=round(bucket.seconds * 1e9),
    )


def _duration(duration: StatisticDuration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
