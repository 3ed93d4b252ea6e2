"""Runs one suite against running servers and prints its counts as the last line of standard output.

usage: run.py SUITE '{"open": URL, "keyed": URL, "tight": URL, "doomed": URL, "key": KEY}'
"""

import faulthandler
import importlib
import json
import sys
import unittest

import support


def main(suite, targets):
    # A test that hangs shows where before the one who waits gives up.
    faulthandler.dump_traceback_later(3600, exit=True)
    targets = json.loads(targets)
    key = targets.pop("key")
    support.Suite.servers = {
        name: support.Server(url, key if name == "keyed" else None) for name, url in targets.items()
    }
    tests = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(suite))
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(tests)
    counts = {
        "ran": result.testsRun,
        "failed": len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses),
        "skipped": len(result.skipped) + len(result.expectedFailures),
    }
    print(json.dumps(counts))
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
