"""docs/metrics.md lists every metric with type, labels and meaning."""

import pytest

import metrics_page


def test_the_page_is_fresh() -> None:
    text = metrics_page.PAGE.read_text()

    assert metrics_page.page(text) == text


def test_a_stale_table_is_seen() -> None:
    text = metrics_page.PAGE.read_text()
    stale = text.replace("nv_inference_count", "nv_inference_amount")

    assert metrics_page.page(stale) == text


def test_a_page_without_its_tables_is_refused() -> None:
    with pytest.raises(SystemExit, match="tables"):
        metrics_page.page("# Metrics")
