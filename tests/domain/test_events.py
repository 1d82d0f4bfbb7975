"""Events survive the way to a file and back; junk is refused."""

import json

import pytest

from swell.domain import Event, EventKind, InputError, read_events, write_events


def test_round_trip() -> None:
    events = [
        Event(0.0, EventKind.SUBMITTED, job_id="a", data={"gpus": 4, "deadline_s": None}),
        Event(1.5, EventKind.RESIZED, job_id="a", data={"gpus": [0, 1], "before": [0], "pause_s": 0.5}),
        Event(2.0, EventKind.NODE_LOST, node="n3", data={"gpus": 4}),
    ]
    lines = list(write_events(events))
    assert [json.loads(line)["v"] for line in lines] == [1, 1, 1]
    back = list(read_events([*lines, "\n"]))
    assert [(e.time_s, e.kind, e.job_id, e.node, dict(e.data)) for e in back] == [
        (e.time_s, e.kind, e.job_id, e.node, dict(e.data)) for e in events
    ]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"v":1}',
        '{"v":1,"time_s":"x","kind":"finished","job_id":"a"}',
        '{"v":1,"time_s":1,"kind":"exploded","job_id":"a"}',
        '{"v":9,"time_s":1,"kind":"finished","job_id":"a"}',
        '{"v":1,"time_s":1,"kind":"finished"}',
    ],
)
def test_junk_is_refused(line: str) -> None:
    with pytest.raises(InputError):
        Event.from_json(line)


def test_an_event_needs_its_subject() -> None:
    with pytest.raises(InputError, match="job_id"):
        Event(0.0, EventKind.FINISHED)
    with pytest.raises(InputError, match="node"):
        Event(0.0, EventKind.NODE_LOST, job_id="a")
