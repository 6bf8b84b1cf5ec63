"""One device's dispatcher, step by step, on a route built by hand.

"a" first uses the input and sends to "b", then has a segment of its own; "b" answers with the next iteration's input.
"""

from tessera_core.execute.dispatch import Dispatcher, Work
from tessera_core.execute.segments import Feed, RouteModel, RouteProgram, RouteTransfer, Segment
from tessera_core.plan.ir import Transfer

THERE, BACK = 0, 1


def transfer(index: int, source: str, destination: str, feeds: str | None) -> RouteTransfer:
    plain = Transfer(
        route=0,
        program="step",
        order=index,
        buffer=index,
        producer=index,
        source=source,
        destination=destination,
        bytes=8,
        boxes=None,
        combine="copy",
        time_us=1.0,
    )
    return RouteTransfer(
        index=index,
        program=0,
        transfer=plain,
        sender_us=0.0,
        link_us=1.0,
        latency_us=0.0,
        receiver_us=0.0,
        used=feeds is None,
        copied=False,
        feeds=feeds,
    )


def segment(device: str, index: int, kernel: int, **fields: tuple[int | str, ...]) -> Segment:
    rest = {name: fields.get(name, ()) for name in ("receives", "sends", "frees", "fed")}
    return Segment(device=device, index=index, kernels=(kernel,), duration_us=10.0, **rest)  # type: ignore[arg-type]


MODEL = RouteModel(
    route=0,
    slots=2,
    batch=1,
    share=1.0,
    devices=("a", "b"),
    programs=(
        RouteProgram(
            index=0,
            name="step",
            rate=3,
            target=0,
            segments={
                "a": (segment("a", 0, 0, fed=("x",), sends=(THERE,)), segment("a", 1, 2)),
                "b": (segment("b", 0, 1, receives=(THERE,), frees=(THERE,), sends=(BACK,)),),
            },
            feeds=(Feed(output="y", input="x", device="a", transfer=BACK),),
        ),
    ),
    transfers=(transfer(THERE, "a", "b", None), transfer(BACK, "b", "a", "x")),
)


def picked(dispatcher: Dispatcher) -> Work:
    work = dispatcher.pick()
    assert work is not None
    return work


def test_an_output_lands_only_when_the_iteration_that_may_still_read_the_input_has_ended() -> None:
    a = Dispatcher("a", [MODEL])
    a.start(0, 0, [0, 0, 0], 0)
    assert a.done(picked(a), 1).ended == ()
    early = a.filled(0, BACK, 2)
    assert (early.landed, early.freed) == ((), ())
    progress = a.done(picked(a), 3)
    assert progress.ended == ((0, 0),)
    assert [(item.iteration, item.feed.input) for item in progress.landed] == [(0, "x")]
    assert progress.freed == (BACK,)


def test_a_segment_waits_for_its_input_and_for_the_region_that_it_sends_to() -> None:
    a = Dispatcher("a", [MODEL])
    a.start(0, 0, [0, 0, 0], 0)
    for _ in range(2):
        a.done(picked(a), 1)
    assert a.pick() is None  # neither has come back
    a.filled(0, BACK, 2)
    assert a.pick() is None  # the region is still taken
    a.drained(0, THERE)
    work = picked(a)
    assert (work.iteration, work.segment.index, work.sends) == (1, 0, (THERE,))


def test_a_transfer_may_arrive_before_its_batch() -> None:
    b = Dispatcher("b", [MODEL])
    b.filled(1, THERE, 0)
    assert b.pick() is None
    b.start(1, 7, [0], 1)
    work = picked(b)
    assert (work.batch, work.lane, work.sends) == (7, 1, ())  # the last iteration's output feeds nothing
    progress = b.done(work, 2)
    assert progress.complete
    assert progress.freed == (THERE,)


def test_a_batch_is_complete_after_its_last_segment() -> None:
    a = Dispatcher("a", [MODEL])
    a.start(0, 0, [0, 0], 0)
    for _ in range(2):
        a.done(picked(a), 1)
    a.filled(0, BACK, 2)
    a.drained(0, THERE)
    a.done(picked(a), 3)
    assert a.done(picked(a), 4).complete


def test_the_batch_that_entered_its_iteration_first_goes_first_and_ties_go_to_the_lower_number() -> None:
    a = Dispatcher("a", [MODEL])
    a.start(1, 5, [0], 3)
    a.start(0, 6, [0], 2)
    assert [picked(a).batch, picked(a).batch] == [6, 5]
    a = Dispatcher("a", [MODEL])
    a.start(1, 5, [0], 2)
    a.start(0, 6, [0], 2)
    assert picked(a).batch == 5
