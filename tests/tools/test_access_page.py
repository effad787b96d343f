"""The table of operations on the access page matches the code."""

import access_page
from xlaserve.serving.call import Operation


def test_the_page_is_fresh() -> None:
    assert access_page.PAGE.read_text() == access_page.page()


def test_every_operation_is_on_the_page() -> None:
    found = {operation for operation, _, _ in access_page.doors(access_page.every_route())}

    assert set(Operation) == found
