"""Plans that strategies compile: pure, the same pieces in every step, each gradient sent once."""

from dataclasses import replace

import pytest

import tfscale
from tests.helpers.grid_exchange import EXCHANGES, GridSum
from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError, PlanError
from tfscale.exchange.auto import Mixed
from tfscale.exchange.base import resolve
from tfscale.exchange.plan import GradientOptions, Parameter, Rows, Table, Wire
from tfscale.plan.buckets import GradientSpec

GROUP = Group(0, (0, 1, 2, 3), 1)
SHAPES = {
    "words/embeddings": (11, 4),
    "wide/kernel": (44, 17),
    "wide/bias": (17,),
    "scale/local": (17,),
    "head/kernel": (17, 3),
    "head/bias": (3,),
}
MIXED = Mixed(
    "mixed",
    (
        ("allreduce", ("head/kernel", "head/bias")),
        ("partial", ("wide/kernel", "wide/bias")),
        ("sharded", ("words/embeddings",)),
    ),
    (("wide", "partial"),),
)
STRATEGIES = {
    **{name: resolve(name) for name in EXCHANGES},
    "mixed": MIXED,
    "local": tfscale.LocalSGD(2, 4),
    "per variable": tfscale.Sharded(bucket_mb=0),
}


def table(**forms: str) -> Table:
    """Return the parameters; forms of gradients by the end of their layers' names."""
    parameters = []
    for i, (path, shape) in enumerate(SHAPES.items()):
        layer = path.split("/")[0]
        own = {"gradient": forms.get(layer, "none"), "is_local": i == 3}
        own |= {"row_bucket": 1} if layer == "wide" else {}
        parameters.append(Parameter(GradientSpec(path, shape, "float32"), "float32", **own))
    return Table(tuple(parameters))


DENSE = {"words": "rows", "wide": "weights", "scale": "weights", "head": "weights"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_tables_have_equal_plans(name):
    plans = [STRATEGIES[name].plan(table(**DENSE), GROUP) for _ in range(2)]
    assert plans[0] == plans[1]
    sent = [i for part in plans[0].parts for i in part.indices]
    assert sorted(sent) == [0, 1, 2, 4, 5]  # each once; that of a local parameter never


@pytest.mark.parametrize("name", STRATEGIES)
def test_pieces_are_those_of_the_build(name):
    """Whichever gradients a step has, and in whatever form."""
    strategy = STRATEGIES[name]
    built = strategy.plan(table(), GROUP)
    assert built.parts == ()
    for forms in (DENSE, {"head": "weights"}, {**DENSE, "wide": "partial"}):
        assert strategy.plan(table(**forms), GROUP).segments == built.segments


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("chosen", [{}, {"n_messages": 1}])
def test_a_message_has_variables_of_one_device(name, chosen):
    own = table(**DENSE)
    placed = [replace(p, device=f"CPU:{i % 4 // 2}") for i, p in enumerate(own.parameters)]
    plan = STRATEGIES[name].plan(replace(own, parameters=tuple(placed), **chosen), GROUP)
    for indices in [part.indices for part in plan.parts] + [b.indices for b in plan.segments]:
        assert len({placed[i].device for i in indices}) == 1
    sent = [i for part in plan.parts for i in part.indices]
    assert sorted(sent) == [0, 1, 2, 4, 5]


def test_parts_are_in_the_order_of_back_propagation():
    plan = tfscale.Allreduce(bucket_mb=0).plan(table(**DENSE), GROUP)
    assert [part.indices for part in plan.parts] == [(5,), (4,), (2,), (1,), (0,)]
    assert [type(part).__name__ for part in plan.parts] == ["Sum"] * 4 + ["Rows"]
    plan = STRATEGIES["per variable"].plan(table(**DENSE), GROUP)
    # The kernel and bias of a layer that is cut between rows are one bucket.
    assert [part.indices for part in plan.parts] == [(5,), (4,), (1, 2), (0,)]


def test_parameters_of_one_plan_go_several_ways():
    plan = MIXED.plan(table(**{**DENSE, "wide": "partial"}), GROUP)
    assert [(type(part).__name__, part.indices) for part in plan.parts] == [
        ("Sum", (5, 4)),
        ("Partial", (1,)),
        ("Partial", (2,)),
        ("Scatter", (0,)),
    ]
    # A rank's pieces of the kernel end between its rows.
    (bucket,) = (b for b in plan.segments if 1 in b.indices)
    assert bucket.cuts[:-1] == tuple(11 * rank * 17 for rank in range(4))


def test_messages_that_the_user_wants():
    chosen = replace(table(**DENSE), messages=((5, 1), (2,)))
    for name in ("allreduce", "grid"):
        plan = STRATEGIES[name].plan(chosen, GROUP)
        assert [part.indices for part in plan.parts] == [(4,), (2,), (5, 1), (0,)]
    in_two = tfscale.Allreduce().plan(replace(table(**DENSE), n_messages=2), GROUP)
    assert [part.indices for part in in_two.parts] == [(5, 4), (2, 1), (0,)]


def test_an_exchange_of_ones_own():
    plan = resolve("grid").plan(table(**DENSE), GROUP)
    assert {type(part) for part in plan.parts} == {GridSum, Rows}
    with pytest.raises(ConfigError, match="exchange must be one of 'allreduce', .*'grid'"):
        resolve("grids")


def test_a_strategy_that_cuts_and_does_not_say_so():
    wire = Wire(GROUP, GradientOptions(compression=tfscale.Compression.none), ())
    with pytest.raises(PlanError, match="is_sharding = True"):
        _ = wire.cut
