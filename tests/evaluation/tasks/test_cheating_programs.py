"""Programs that compute nothing, or cheat: whatever they return or do, none is right."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbd_core.evaluation.sandbox.plain_data import Opaque, Value
from mbd_core.evaluation.sandbox.processes import Limits
from mbd_core.evaluation.sandbox.programs import Call, run_calls, run_tests
from mbd_core.evaluation.tasks.kinds.evalplus_rules import Comparison, Dataset

LIMITS = Limits(wall_seconds=20.0, cpu_seconds=20, memory_bytes=1 << 30)

# What is right: no constant of the cheats below is near any of these
EXPECTED: tuple[Any, ...] = (
    731,
    731.25,
    -1e-5 - 3,
    10**400 + 7,
    731 + 2j,
    "x731",
    b"x731",
    [731],
    [731.25],
    [731.25, -8.5],
    [731.25] * 3,
    (731.25,),
    (731.25, -8.5),
    [[731.25, -8.5], [3.5, 4.75]],
    [(731.25, -8.5)],
    ["x731", "y"],
    {"x731": 731.25},
    {731, 12},
    frozenset((731, 12)),
    [{"x731": 731.25}],
    [[], [731.25]],
    math.inf,
    -math.inf,
    [math.inf],
    [None, 731.25],
)
SPECIAL: tuple[tuple[Dataset, str, Any, Any], ...] = (
    ("mbpp", "surface_Area", (31, 47), 7000),
    ("mbpp", "digit_distance_nums", (98765, 12), 9 + 8 + 7 + 5 + 3),
    ("mbpp", "similar_elements", (), (731, 12)),
    ("humaneval", "find_zero", ([-731.0, 3.0],), 731.0 / 3),
)


def comparisons() -> Iterator[Comparison]:
    for expected, atol in itertools.product(EXPECTED, (0.0, 1e-6, 1e-4)):
        right = Value(expected, type(expected).__name__)
        for dataset in ("humaneval", "mbpp"):
            yield Comparison(dataset=dataset, entry_point="f", inputs=[()], expected=[right], atol=atol)  # type: ignore[arg-type]
    for dataset, entry_point, arguments, expected in SPECIAL:
        right = Value(expected, type(expected).__name__)
        yield Comparison(dataset=dataset, entry_point=entry_point, inputs=[arguments], expected=[right], atol=1e-4)


def accepted(out: Value) -> list[Any]:
    """What the result passes for, whatever type it claims to be."""
    names = {out.type_name, *(type(expected).__name__ for expected in EXPECTED)}
    claims = [Value(out.value, name, out.seconds) for name in names]
    return [one.expected[0].value for one in comparisons() for claim in claims if one.accept(0, claim)]


def test_the_right_results_are_right_and_only_for_themselves() -> None:
    for expected in EXPECTED:
        if expected == expected:
            found = accepted(Value(expected, type(expected).__name__))
            assert found and all(one == expected or one is SPECIAL[2][3] for one in found), expected


# -- values -----------------------------------------------------------------------------------------------------------

numbers = st.integers() | st.floats() | st.booleans() | st.complex_numbers() | st.just(10**4000)
nothing = st.sampled_from([None, "", b"", math.nan, math.inf, -math.inf, Opaque(), (), [], {}])
data = st.recursive(
    numbers | nothing | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


def is_near(out: Any, expected: Any) -> bool:
    """Equal, or nested alike with numbers that are within every tolerance."""
    if isinstance(out, list | tuple) and isinstance(expected, list | tuple):
        return len(out) == len(expected) and all(map(is_near, out, expected))
    if isinstance(out, int | float | complex) and isinstance(expected, int | float | complex):
        return bool(out == expected) or abs(complex(out) - complex(expected)) <= 2e-4
    return bool(out == expected)


@settings(max_examples=150)
@given(data, st.integers(0, 2))
def test_no_plain_data_passes_for_another(out: Any, nesting: int) -> None:
    for value in (out, [out] * nesting, [[out]] * nesting, [out for _ in range(nesting)] + [[]]):
        for expected in accepted(Value(value, "float")):
            special = [one for *_, one in SPECIAL if one is expected]
            assert special or is_near(value, expected), (value, expected)


@pytest.mark.parametrize(
    "nested", [[[]], [[], []], [[[]]], [{}], [()], ((),), [[731.25], [-8.5]], [[731.25, -8.5]] * 2]
)
def test_shapes_are_not_broadcast(nested: Any) -> None:
    assert accepted(Value(nested, "list")) == []


# -- programs ---------------------------------------------------------------------------------------------------------

NAMES = ("float", "int", "list", "tuple", "str", "dict", "complex", "float64", "ndarray", "Value", "Digest")
BASES = ("list", "tuple", "dict", "set", "frozenset", "int", "float", "str", "bytes", "complex", "object")
METHODS = """
    __class__ = {name}_
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([0.0])
    __getitem__ = lambda self, key: 0.0
    __float__ = __index__ = __int__ = lambda self: 0
    __sub__ = __rsub__ = __abs__ = lambda self, *_: self
    __le__ = __lt__ = __ge__ = __gt__ = lambda self, other: True
    __reduce__ = lambda self: (float, (0.0,))
    item = lambda self: self
    __module__ = 'numpy'
"""
VALUES = """
    math.nan, math.inf + 1 - math.inf, -0.0, 0, 1, True, False, None, '', b'', (), [], {}, set(), frozenset(), 0j,
    [[]], [()], [{}], [[], []], [[[]]], ((),), [[[0.0]]], [math.nan], [True], [None], ['nan'], {0: 0.0}, {'x': []},
    10 ** 4000, -10 ** 4000, [10 ** 400], 1 << 70, 1e308 * 10, complex(math.nan, 0), [complex(0, math.inf)],
    range(0), range(3), iter([]), (x for x in ()), map(float, []), zip(), enumerate([]), {}.keys(), {}.values(),
    {}.items(), memoryview(b''), bytearray(b''), slice(None), Ellipsis, NotImplemented, object(), float, list, len,
    numpy.array(0.0), numpy.array([]), numpy.array([[]]), numpy.zeros((0, 3)), numpy.array([None]), numpy.nan,
    numpy.array({'a': 1}, dtype=object), numpy.float64(0), numpy.float64('nan'), numpy.longdouble(1), numpy.bool_(1),
    numpy.str_('x'), numpy.ma.masked, numpy.datetime64('NaT'), numpy.zeros(1, dtype='f8,f8')[0], numpy.void(b'x'),
    numpy.array([[0.0]]).view(numpy.matrix), fractions.Fraction(1, 3), decimal.Decimal('NaN'),
    decimal.Decimal('Infinity'),     collections.UserList(), collections.Counter(), collections.OrderedDict(),
    collections.deque(),
    collections.ChainMap(), collections.defaultdict(float), array.array('d'), unittest.mock.MagicMock(),
    unittest.mock.ANY, weakref.proxy(K),
    endless, twice, types.SimpleNamespace(value=0.0), Exception(), (lambda: 0.0), f, sys.modules
"""
PROGRAM = f"""
import array, collections, decimal, fractions, math, sys, types, unittest.mock, weakref
import numpy
class K: pass
endless = []; endless.append(endless)
twice = {{}}; twice['x'] = twice
def f(number):
    return ({" ".join(VALUES.split())},)[number]
"""
COUNT = 93


def disguised() -> Iterator[str]:
    """Classes that are called like one type, are another, and answer everything."""
    for name in NAMES:
        lines = ["import builtins, types, random"]
        for base in BASES:
            real = f"{name}_ = getattr(builtins, {name!r}, float)"
            lines += [real, f"base = builtins.{base}", f"class {name}(base):" + METHODS.format(name=name)]
            lines += [f"made_{base} = {name}()", f"class {name}(base): pass", f"plain_{base} = {name}()"]
        made = ", ".join(f"made_{base}, plain_{base}, [made_{base}], [[plain_{base}]]" for base in BASES)
        yield "\n".join([*lines, "def f(number):", f"    return ({made})[number]"])


def survey(program: str, count: int) -> tuple[list[tuple[Any, list[Any]]], int]:
    """The calls whose results pass for something, and how many arrived as data."""
    arrived, passing, number = 0, [], 0

    def keep(_number: int, out: Value) -> bool:
        nonlocal arrived
        arrived += 1
        if found := accepted(out):
            passing.append((out.value, found))
        return True

    while number < count:  # a call that raises, or ends the program, is skipped
        before = arrived
        calls = [Call(arguments=[one], seconds=5.0, longest=1 << 20) for one in range(number, count)]
        run_calls(program, "f", calls, keep, limits=LIMITS)
        number += arrived - before + 1
    return passing, arrived


def test_no_strange_value_passes() -> None:
    passing, arrived = survey(PROGRAM, COUNT)
    assert [one for one in passing if one[1] != [one[0]] * len(one[1])] == []
    assert arrived > COUNT / 2, "most are data, or stand for it"


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_no_disguise_passes(number: int) -> None:
    program = next(itertools.islice(disguised(), number, None))
    passing, arrived = survey(program, 4 * len(BASES))
    assert passing == [] and arrived > len(BASES)


ATTEMPTS = {
    "functions of the encoder": """
        from mbd_core.evaluation.sandbox import plain_data
        plain_data.encode = plain_data._encode = lambda *a, **k: '["float",[],0.0]'
        plain_data._WRITERS.clear()
        def f(*_): return 0""",
    "the sender": """
        import os, sys
        frame = sys._getframe()
        while frame:
            for space in (frame.f_globals, frame.f_locals):
                for name in list(space):
                    if callable(space[name]) and name in ('encode', 'decode', 'accept', 'convert', 'write', 'clock'):
                        space[name] = lambda *a, **k: '["list",[[]],0.0]'
            frame = frame.f_back
        def f(*_): return float()""",
    "what is searched in memory": """
        import gc
        def f(*_):
            for thing in gc.get_objects():
                for one in thing if isinstance(thing, (list, tuple)) else ():
                    if type(one) is float and 4 * one == 2925: return one
            return 0""",
    "lines of its own": """
        import os
        for fd in range(3, 20):
            try: os.write(fd, b'=\\n' + b'=["float",[],0.0]\\n=["list",[[]],0.0]\\n' * 9)
            except OSError: pass
        def f(*_): os._exit(0)""",
    "lines at the exit": """
        import atexit, os, threading
        atexit.register(os.write, 5, b'=["float",true,0.0]\\n')
        def f(*_): threading.Thread(target=os.write, args=(5, b'=["float",NaN,0.0]\\n')).start()""",
    "lines that are no data": """
        import os
        LINES = [b'=["float",{"digest":["x",1]},0.0]', b'=["float",{"digest":[{},{}]},0.0]',
                 b'=["float",{"opaque":[]},0.0]', b'=["float",{"complex":[NaN,NaN]},0.0]',
                 b'=["float",{"set":[[]]},0.0]',
                 b'=["float",{"int":"-0"},0.0]',
                 b'=["float",{"Fraction":"1/0"},0.0]', b'=["float",{"Decimal":"sNaN"},0.0]', b'=["float",[[]],-1e999]',
                 b'=[[],[[]],0.0]', b'=["float",' + b'[' * 900 + b']' * 900 + b',0.0]', b'passed', b'= passed ', b'=']
        for fd in range(3, 20):
            for line in LINES:
                try: os.write(fd, b'=\\n' + line + b'\\n')
                except OSError: pass
        def f(*_): return 0""",
    "builtins": """
        import builtins, json, math, numpy, pickle, sys
        for module in (json, math, numpy, pickle):
            for name in dir(module):
                if callable(getattr(module, name)) and not name.startswith('_'):
                    try: setattr(module, name, lambda *a, **k: True)
                    except (AttributeError, TypeError): pass
        builtins.isinstance = builtins.abs = builtins.all = builtins.len = lambda *a, **k: True
        sys.modules['json'] = sys.modules['numpy'] = sys.modules['math'] = None
        def f(*_): return [[]]""",
    "a signal": """
        import signal, os
        signal.signal(signal.SIGALRM, lambda *a: os.write(5, b'=["float",[],0.0]\\n'))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        def f(*_):
            while True: pass""",
    "a stack without end": "def f(*a): return f(*a)",
    "a recursion of types": """
        def f(*_):
            out = 0.0
            for _ in range(300): out = type('list', (list,), {})([out])
            return out""",
}
TESTS = (
    "assert f(1) == 731",
    "assert f(1) == [731.25]",
    "assert abs(f(1) - 731.25) < 1e-6",
    "assert f(1) == {'x': (1, 2)}",
    "import math\nassert math.isclose(f(1), 731.25)",
    "import numpy\nassert numpy.allclose(f(1), [731.25, 8.5])\nassert len(f(1)) == 2",
    "assert sorted(f(1)) == [1, 2, 731]",
    "assert isinstance(f(1), str) and f(1) == 'x731'",
    "assert set(f(1)) == {731, 12}",
)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_passes(name: str) -> None:
    program = textwrap.dedent(ATTEMPTS[name]) + "\n"
    found: list[list[Any]] = []

    def keep(_number: int, out: Value) -> bool:
        found.append(accepted(out))
        return True

    calls: Sequence[Call] = [Call(arguments=[number], seconds=1.0, longest=1 << 20) for number in range(3)]
    run_calls(program, "f", calls, keep, limits=LIMITS)
    assert not any(found)
    tests = "\n".join(
        f"try:\n{textwrap.indent(test, '    ')}\n    passed += 1\nexcept Exception: pass" for test in TESTS
    )
    verdict = run_tests(
        program, tests=f"passed = 0\n{tests}\nassert passed", entry_point="f", limits=Limits(wall_seconds=4.0)
    )
    assert verdict.reason != "passed", verdict
