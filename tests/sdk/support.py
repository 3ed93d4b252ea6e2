"""What the suites share: the servers under test, what they say of themselves, and conditions to wait for.

The servers are started by tests/sdk.rs and named on the command line; nothing here starts or ends one.
"""

import asyncio
import json
import time
import unittest
import urllib.request

MODEL = "smollm2-135m-instruct"
FRANCE = "What is the name of the capital of France?"
STORY = "Tell me a very long story about a dragon and a knight."
USER = [{"role": "user", "content": FRANCE}]
# A conversation that goes on for minutes.
LONG = dict(model=MODEL, messages=[{"role": "user", "content": STORY}], max_tokens=6000, extra_body={"ignore_eos": True})
# As long as a wait may take on a busy machine; a test that passes never waits so long.
PATIENCE = 120.0


class Server:
    """One running server, seen from outside its dialects."""

    def __init__(self, url, key=None):
        self.url, self.key = url, key

    def _call(self, path, body=None):
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)

    def stats(self):
        return self._call("/stats")

    def native(self, **body):
        return self._call("/v1/generate", body)

    def tokenize(self, **body):
        return self._call("/tokenize", body)["tokens"]

    def at_rest(self):
        stats = self.stats()
        return stats["active_requests"] == stats["queued_requests"] == stats["kv_pages_used"] == 0

    def settle(self):
        """Waits until nobody is inside and every page is back; the figures of that moment."""
        until("everything is back", self.at_rest)
        return self.stats()


def until(what, condition):
    """Waits until a condition is true."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > PATIENCE:
            raise AssertionError(f"{what} did not happen within {PATIENCE} s")
        time.sleep(0.01)


async def meanwhile(what, condition, *tasks):
    """Waits until a condition is true while tasks run; one that ends early with an error ends the wait."""
    start = time.monotonic()
    while not condition():
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() - start > PATIENCE:
            raise AssertionError(f"{what} did not happen within {PATIENCE} s")
        await asyncio.sleep(0.01)


class Suite(unittest.TestCase):
    """A test with the servers at hand: `open` (no key), `keyed`, `tight` (one resident, one waiting, small bodies), `doomed`."""

    servers: dict[str, Server] = {}
    longMessage = True

    def setUp(self):
        self.open, self.keyed = self.servers["open"], self.servers["keyed"]
        self.tight, self.doomed = self.servers["tight"], self.servers["doomed"]
        self.before = self.open.settle()

    def gained(self, name):
        """How much a counter of the open server grew since the test began."""
        return self.open.stats()[name] - self.before[name]

    def assert_cancelled(self, count):
        """That many requests were cancelled, none completed, and everything is back."""
        until(f"{count} cancelled", lambda: self.gained("cancelled_requests") == count)
        self.open.settle()
        self.assertEqual(self.gained("cancelled_requests"), count, "counted once")
        self.assertEqual(self.gained("completed_requests"), 0)
