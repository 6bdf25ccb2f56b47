"""Runs inside the child process that executes a response's program; never imported. Its working directory holds what it needs.

`program.py` is the program. With `call.json` ({"name", "arguments"}) the function `name` is called and its value written as JSON to
descriptor 3; such a program finds the names that LeetCode's editor gives it. With `check.py` that text is executed in the program's
namespace and `null` written; else the program runs as a script.
"""

import json
import os
import runpy
import sys

_RECURSION = 100_000

sys.setrecursionlimit(_RECURSION)
sys.argv = ["program.py"]
if os.path.exists("call.json") or os.path.exists("check.py"):
    given: dict[str, object] = {}
    if os.path.exists("call.json"):
        for module in ("typing", "collections", "functools", "itertools", "heapq", "bisect"):
            exec(f"from {module} import *", given)
        exec("from math import ceil, comb, floor, gcd, inf, log, sqrt", given)
        exec("import bisect, collections, functools, heapq, itertools, math, operator, random, re, string", given)
    namespace = runpy.run_path("program.py", init_globals=given, run_name="program")
    value = None
    if os.path.exists("call.json"):
        with open("call.json") as file:
            call = json.load(file)
        function = namespace.get(call["name"])
        if function is None and "Solution" in namespace:
            function = getattr(namespace["Solution"](), call["name"])
        value = function(*call["arguments"])  # type: ignore[misc]  # no such function: a TypeError, and the test has failed
    else:
        with open("check.py") as file:
            exec(compile(file.read(), "check.py", "exec"), namespace)
    os.write(3, json.dumps(value).encode())
else:
    runpy.run_path("program.py", run_name="__main__")
