"""The state table on the operations page."""

import states_page


def test_the_page_is_fresh() -> None:
    text = states_page.PAGE.read_text()

    assert text == states_page.page(text)
    assert states_page.table() in text
