from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object_server import Fault, Handler, Shelves, serving_objects

from xlaserve.storage import fetching
from xlaserve.storage.fetching import FetchControl, fetch_file
from xlaserve.storage.http_store import HttpStore
from xlaserve.storage.objects import ObjectChanged, RemoteObject, StoreProblem

CONTENT = bytes(range(256)) * 20_000
PATH = "root/m/1/w"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less between attempts."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def place() -> Iterator[tuple[str, Shelves]]:
    with serving_objects(**{PATH: CONTENT, "root/m/config.json": b"{}"}) as made:
        yield made


def store(url: str, **changes: float) -> HttpStore:
    limits = {"seconds": 30.0, "max_objects": 100} | changes
    return HttpStore(url, seconds=limits["seconds"], max_objects=int(limits["max_objects"]))


def fetched(place: tuple[str, Shelves], target: Path, **changes: float) -> bytes:
    """Download the single large object as a load does."""
    (found,) = [one for one in store(place[0]).objects() if one.name == "m/1/w"]
    fetch_file(store(place[0], **changes), found, target, FetchControl(60))
    return target.read_bytes()


def cut_at(count: int, times: int) -> Fault:
    left = [times]

    def cut(handler: Handler, content: bytes) -> bool:
        if not left[0]:
            return False
        left[0] -= 1
        start, stop = handler.part(len(content))
        more = {"Content_Range": f"bytes {start}-{stop - 1}/{len(content)}"} if start else {}
        handler.head(handler.name, stop - start, 206 if start else 200, **more)
        handler.wfile.write(content[start : start + count])
        handler.wfile.flush()
        return True

    return cut


def test_an_object_is_found_by_its_name(place: tuple[str, Shelves]) -> None:
    """A missing object is not an error, but an unreachable server is."""
    made = store(place[0])
    found, missing = made.find("m/1/w"), made.find("m/1/nothing")
    place[1].is_away = True

    assert found == RemoteObject("m/1/w", len(CONTENT), place[1].etag(PATH))
    assert missing is None
    with pytest.raises(StoreProblem, match="the server answered 503"):
        made.find("m/1/w")


def test_a_server_is_listed_by_its_pages(place: tuple[str, Shelves]) -> None:
    found = store(place[0]).objects()

    assert [("m/1/w", len(CONTENT)), ("m/config.json", 2)] == [
        (one.name, one.size_bytes) for one in found
    ]
    assert all(one.mark for one in found)
    assert place[1].gets() == []


def test_a_cut_download_goes_on_where_it_stopped(
    place: tuple[str, Shelves], tmp_path: Path
) -> None:
    """No byte is requested twice, however often the connection breaks."""
    place[1].fault = cut_at(1_000_000, times=3)

    assert CONTENT == fetched(place, tmp_path / "w")
    last = len(CONTENT) - 1
    expected = ["", *(f"bytes={start}-{last}" for start in (1_000_000, 2_000_000, 3_000_000))]
    assert expected == [
        said for method, path, said in place[1].asked if (method, path) == ("GET", PATH)
    ]


def test_what_another_process_fetched_is_kept(place: tuple[str, Shelves], tmp_path: Path) -> None:
    target = tmp_path / "w"
    target.write_bytes(CONTENT[:4_000_000])

    assert CONTENT == fetched(place, target)
    assert [f"bytes=4000000-{len(CONTENT) - 1}"] == [
        said for method, path, said in place[1].asked if (method, path) == ("GET", PATH)
    ]


def test_a_server_without_ranges_is_read_from_the_beginning(
    place: tuple[str, Shelves], tmp_path: Path
) -> None:
    def whole(handler: Handler, content: bytes) -> bool:
        handler.head(handler.name, len(content))
        handler.wfile.write(content)
        return True

    target = tmp_path / "w"
    target.write_bytes(b"?" * 1000)
    place[1].fault = whole

    assert CONTENT == fetched(place, target)


def test_what_is_read_again_is_no_progress(place: tuple[str, Shelves], tmp_path: Path) -> None:
    """A server that sends no parts, and cuts each answer, is given up."""

    def half(handler: Handler, content: bytes) -> bool:
        handler.head(handler.name, len(content))
        handler.wfile.write(content[: len(content) // 2])
        return True

    place[1].fault = half

    with pytest.raises(StoreProblem, match="ended at byte 2560000 of 5120000"):
        fetched(place, tmp_path / "w")
    # Each second one asks for the rest, which this server does not have.
    assert 2 * fetching.ATTEMPTS - 1 == len(place[1].gets())


def test_an_object_that_changes_meanwhile_is_refused(
    place: tuple[str, Shelves], tmp_path: Path
) -> None:
    """Halves of two objects would form a file that never existed."""
    cut = cut_at(1_000_000, times=1)

    def change(handler: Handler, content: bytes) -> bool:
        done = cut(handler, content)
        place[1].objects[PATH] = CONTENT[::-1]
        return done

    place[1].fault = change

    with pytest.raises(ObjectChanged, match="'m/1/w' changed while it was fetched"):
        fetched(place, tmp_path / "w")


def lie(**headers: str) -> Fault:
    def answer(handler: Handler, content: bytes) -> bool:
        handler.head(handler.name, len(content), 200, **headers)
        handler.wfile.write(content)
        return True

    return answer


def endless(handler: Handler, content: bytes) -> bool:
    handler.head(handler.name, None)
    while not handler.shelves.released.is_set():
        try:
            handler.wfile.write(content)
        except OSError:
            break
    return True


def longer(handler: Handler, content: bytes) -> bool:
    handler.head(handler.name, len(content) + 1)
    handler.wfile.write(content + b"!")
    return True


def stalls(handler: Handler, content: bytes) -> bool:
    handler.head(handler.name, len(content))
    handler.shelves.released.wait()
    return True


def moves(location: str) -> Fault:
    def answer(handler: Handler, content: bytes) -> bool:
        handler.head("", 0, 302, Location=location)
        return True

    return answer


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (endless, "has more than the 5120000 bytes"),
        (longer, "has 5120001 bytes, expected 5120000"),
        (lie(Content_Encoding="gzip"), "sends Content-Encoding 'gzip', expected identity"),
        (moves("https://127.0.0.1:1/x"), "redirects from http to https"),
        (moves("file:///etc/passwd"), "redirects from http to file"),
        (moves("/root/m/1/w"), "redirects more than 5 times"),
        (stalls, r"no answer within 0\.2 seconds"),
    ],
    ids=["endless", "longer", "gzip", "https", "file", "circle", "stall"],
)
def test_a_hostile_answer_is_refused(
    place: tuple[str, Shelves], tmp_path: Path, fault: Fault, reason: str
) -> None:
    place[1].fault = fault
    stall = 0.2 if fault is stalls else 30.0

    with pytest.raises(StoreProblem, match=reason):
        fetched(place, tmp_path / "w", seconds=stall)
    assert (tmp_path / "w").stat().st_size <= len(CONTENT)


def test_a_redirect_of_the_same_scheme_is_followed(
    place: tuple[str, Shelves], tmp_path: Path
) -> None:
    with serving_objects(other=CONTENT) as (url, others):
        others.etag = place[1].etag  # type: ignore[method-assign]
        others.objects[PATH] = CONTENT
        place[1].fault = moves(url.replace("/root", f"/{PATH}"))

        assert CONTENT == fetched(place, tmp_path / "w")
        assert [PATH] == others.gets()


def test_what_fails_for_a_moment_is_asked_again(place: tuple[str, Shelves], tmp_path: Path) -> None:
    left = [2]

    def busy(handler: Handler, content: bytes) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            handler.head("", 0, 503)
        return left[0] >= 0

    place[1].fault = busy

    assert CONTENT == fetched(place, tmp_path / "w")


def test_attempts_that_bring_nothing_are_bounded(
    place: tuple[str, Shelves], tmp_path: Path
) -> None:
    place[1].fault = cut_at(0, times=1000)

    with pytest.raises(StoreProblem, match="ended at byte 0 of 5120000"):
        fetched(place, tmp_path / "w")
    assert fetching.ATTEMPTS == len(place[1].gets())


def test_a_listing_has_a_limit(place: tuple[str, Shelves]) -> None:
    page = b"".join(b'<a href="%d">x</a>' % number for number in range(200))
    place[1].pages["root/"] = page

    with pytest.raises(StoreProblem, match=r"more objects than remote_max_objects \(100\)"):
        store(place[0]).objects()


def test_links_that_lead_elsewhere_are_no_objects(place: tuple[str, Shelves]) -> None:
    links = ("../up", "/etc/passwd", "http://127.0.0.2/x", "m/?C=N;O=D", "//other/root/y", "a/b")
    page = "".join(f'<a href="{link}">x</a>' for link in links)
    place[1].pages["root/"] = page.encode()

    assert [] == store(place[0]).objects()


def test_a_store_that_is_not_there_says_so_without_a_secret(place: tuple[str, Shelves]) -> None:
    with pytest.raises(StoreProblem, match="the server answered 404 for 'nothing/'"):
        store(place[0]).objects("nothing")
    with pytest.raises(StoreProblem, match="the connection was refused"):
        store("http://127.0.0.1:1/root").objects()


def test_a_part_is_read_and_no_more(place: tuple[str, Shelves]) -> None:
    made = store(place[0])
    found = RemoteObject("m/1/w", len(CONTENT), place[1].etag(PATH))

    assert CONTENT[8:100] == b"".join(made.read(found, 8, 100))
