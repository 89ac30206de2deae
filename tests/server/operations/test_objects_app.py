import asyncio

import httpx
import pytest

from common.objects import ObjectStore
from server.operations.objects_app import objects_app
from server.public.public_files import said_file


@pytest.fixture
def client(tmp_path):
    store = ObjectStore(tmp_path / "objects")
    (tmp_path / "secret").write_text("secret")
    transport = httpx.ASGITransport(app=objects_app(tmp_path / "objects"))

    def ask(method, path):
        async def one():
            async with httpx.AsyncClient(transport=transport, base_url="https://server") as http:
                return await http.request(method, path)

        return asyncio.run(one())

    return ask, store


def test_an_object_is_served_by_its_hash_as_immutable(client):
    http, store = client
    reply = http("GET", f"/public/{store.put(b'public bytes')}")
    assert (reply.status_code, reply.content) == (200, b"public bytes")
    assert "immutable" in reply.headers["cache-control"]


@pytest.mark.parametrize(
    "path", ["/public/" + "0" * 64, "/public/..%2Fsecret", "/public/", "/", "/docs", "/objects", "/health"]
)
def test_nothing_else_is_there(client, path):
    http, _ = client
    assert http("GET", path).status_code == 404


@pytest.mark.parametrize("what", ["students", "peers"])
def test_signed_files_of_a_study_are_served_by_its_id_and_never_cached(what, client, tmp_path):
    http, _ = client
    study = "a" * 64
    assert http("GET", f"/public/{what}/{study}").status_code == 404
    said_file(tmp_path / "objects", what, study).parent.mkdir()
    said_file(tmp_path / "objects", what, study).write_bytes(b"signed words")
    reply = http("GET", f"/public/{what}/{study}")
    assert (reply.status_code, reply.content) == (200, b"signed words")
    assert reply.headers["cache-control"] == "no-cache"
    for name in ("..%2F..%2Fsecret", "A" * 64, what):
        assert http("GET", f"/public/{what}/{name}").status_code == 404
    assert http("PUT", f"/public/{what}/{study}").status_code == 405


def test_only_reading_is_possible(client):
    http, store = client
    name = store.put(b"x")
    assert http("POST", f"/public/{name}").status_code == 405
    assert http("DELETE", f"/public/{name}").status_code == 405
