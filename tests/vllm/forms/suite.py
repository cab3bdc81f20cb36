"""What every form of vLLM has to pass, with requests running meanwhile.

A form's tests are a subclass of :class:`EngineSuite` with a fixture ``form``: one engine, as its
user sees it. Dtype, model and what its tokens are compared with are the form's, so that the same
suite runs on a GPU, against a freshly loaded engine.
"""

import json
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import PROMPTS, expected, llama_config, make_model
from weightsync.deadline import Deadline

LONG = 60
"""Tokens of a request that is still running when the engine is paused right after its first one."""

BLOCK = 32
"""Tokens of a block of the engines' prefix cache."""

WAIT = 60.0
"""Seconds for whatever should take none."""


def engine_arguments(folder, **changes):
    """What an engine of the suite is made with, by the names of vLLM's ``EngineArgs``."""
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "block_size": BLOCK,
        "dtype": "float32",
        **changes,
    }


# ---------------------------------------------------------------- a form


@dataclass(frozen=True)
class Answer:
    """``versions``: ``(label, number of its first token)`` of each span; None: not reported."""

    tokens: list[int]
    finish_reason: str | None
    versions: list[tuple[str, int]] | None = None

    @classmethod
    def of(cls, output):
        """From a finished ``RequestOutput`` of vLLM's."""
        (completion,) = output.outputs
        spans = getattr(completion, "weight_versions", None)
        versions = None if spans is None else [(span.version, span.start) for span in spans]
        return cls(list(completion.token_ids), completion.finish_reason, versions)


class Running(ABC):
    """A request that runs while other things happen."""

    @abstractmethod
    def wait_begun(self):
        """Until it has at least one token, or has ended."""

    @abstractmethod
    def answer(self):
        """Wait for its end."""


class Form(ABC):
    """One engine of one form.

    Attributes:
        target: what a receiver is given, and ``options`` with it.
        config, dtype: of its model.
        modes: what ``pause`` can do to running requests here.
    """

    target = None
    options = MappingProxyType({})
    config = llama_config()
    dtype = torch.float32
    modes = ("keep", "wait", "abort")

    def model(self, seed):
        return make_model(self.config, seed).to(self.dtype)

    def reference(self, model, prompts, count):
        """The right greedy tokens, from somewhere else."""
        return expected(model, prompts, count)

    @abstractmethod
    def greedy(self, prompts, count):
        """The engine's tokens for each prompt, exactly ``count``."""

    @abstractmethod
    def start(self, prompt, count=LONG):
        """A greedy request, as a :class:`Running`."""

    @abstractmethod
    def label(self):
        """What the engine says it holds; None where it cannot be asked."""


# ---------------------------------------------------------------- watching and breaking an update

STEPS = ("pause", "begin", "load", "finish", "flush", "label", "resume")

AT_ONCE = {"apply": ("begin", "load", "finish")}
"""What a planned update does in one."""

_NAMES = {
    "pause": "pause",
    "reset_prefix_cache": "flush",
    "set_version": "label",
    "resume": "resume",
}


@contextmanager
def stepped(client, before=lambda step: None, after=lambda step: None):
    """Have the steps of an update that a client takes seen, or stopped, by name."""

    def wrap(name):
        plain = getattr(client, name)

        def call(*arguments):
            step = _NAMES.get(name) or json.loads(arguments[0])["op"]
            steps = AT_ONCE.get(step, (step,))
            for each in steps:
                before(each)
            result = plain(*arguments)
            for each in steps:
                after(each)
            return result

        setattr(client, name, call)

    for name in ("ask", *_NAMES):
        wrap(name)
    try:
        yield
    finally:
        for name in ("ask", *_NAMES):
            delattr(client, name)


def often(cases, chosen):
    """Parameters of which only the chosen run every time, and all with the slow tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else slow
        )
        for case in cases
    ]


def at(step, action, times=1):
    """Do something at the first times that a step is taken."""
    left = [times]

    def seen(name):
        if name == step and left[0]:
            left[0] -= 1
            action()

    return seen


def broken():
    raise ws.EngineError("injected")


class DeadDriver:
    """From a step on, nothing that a client says reaches its engine."""

    def __init__(self, step):
        self._step = step
        self._dead = False

    def __call__(self, step):
        self._dead = self._dead or step == self._step
        if self._dead:
            raise ws.EngineError("the driver is dead")


# ---------------------------------------------------------------- the suite


class Run:
    """A trainer, and one receiver after another, on one engine."""

    def __init__(self, form, path):
        self.form = form
        self.scheme = ws.DoubleBufferScheme(path)
        self.sender = self.scheme.create_sender()
        self.sender.connect()
        self.receiver = None
        self._number = 0

    def receive(self, **options):
        """A new receiver, of the engine as it was left."""
        options = {**self.form.options, **options}
        self.receiver = self.scheme.create_receiver(self.form.target, **options)
        self.receiver.connect(timeout=WAIT)
        self.sender.attach(self.receiver)
        return self.receiver

    @property
    def client(self):
        return self.receiver.engine.client

    def send(self, weights):
        self._number += 1
        return self.sender.update_weights(weights, version=self._number)

    def send_during(self, prompt, weights, count=LONG):
        """An update that finds a request in flight. Returns its version, and the request."""
        started = []

        def start():
            started.append(self.form.start(prompt, count))
            started[0].wait_begun()

        with stepped(self.client, before=at("pause", start)):
            report = self.send(weights)
        return report.version, started[0]

    def stop_receiving(self):
        self.sender.detach(self.receiver)
        self.receiver.shutdown()
        self.receiver = None

    def close(self):
        if self.receiver is not None:
            self.receiver.shutdown()
        self.sender.shutdown()


class EngineSuite:
    """Subclass it in ``test_<form>.py``, with a fixture ``form``, module-wide if it can be."""

    @pytest.fixture
    def run(self, form, path):
        run = Run(form, path)
        yield run
        run.close()

    def is_right(self, form, model, prompts=PROMPTS, count=10):
        return form.greedy(prompts, count) == form.reference(model, prompts, count)

    def require_switch(self, form, answer, first, second, prompt):
        """Tokens of the first model up to some point, and from there on those of the second."""
        tokens = answer.tokens
        (old,) = form.reference(first, [prompt], len(tokens))
        same = next((i for i, (a, b) in enumerate(zip(tokens, old, strict=True)) if a != b), None)
        assert same is not None, "the new weights were never used"
        # By chance the new weights' first tokens may be those of the old ones.
        places = [answer.versions[1][1]] if answer.versions else range(same, max(0, same - 4), -1)
        assert any(
            0 < place <= same
            and form.reference(second, [prompt + tokens[:place]], len(tokens) - place)
            == [tokens[place:]]
            for place in places
        )

    def test_three_versions_are_right_at_once_with_requests_running(self, form, run):
        run.receive()
        started, seen = [], set()

        def start():
            started.append(form.start(PROMPTS[0]))
            started[-1].wait_begun()

        for seed in (1, 2, 3):
            model = form.model(seed)
            with stepped(run.client, before=at("pause", start)):
                report = run.send(model)
            assert self.is_right(form, model)
            assert form.label() in (None, str(report.version))
            assert run.receiver.version == report.version
            assert 0 < report.seconds.pause <= report.seconds.apply
            seen.add(str(form.greedy(PROMPTS, 10)))
        assert len(seen) == 3  # weights that never arrive would pass otherwise
        for running in started:
            answer = running.answer()
            assert (len(answer.tokens), answer.finish_reason) == (LONG, "length")

    def test_the_label_is_never_visible_before_the_weights(self, form, run):
        run.receive()
        first = run.send(form.model(1)).version
        if form.label() is None:
            pytest.skip("this form cannot be asked for its label")
        seen = {}

        def look(step):
            seen[step] = form.label()

        with stepped(run.client, before=look):
            second = run.send(form.model(2)).version
        assert {seen[step] for step in STEPS if step != "resume"} == {str(first)}
        assert seen["resume"] == form.label() == str(second)

    def test_k1_the_prefix_cache_holds_nothing_of_the_old_weights(self, form, run):
        run.receive()
        prompt = [[number % 90 for number in range(3 * BLOCK + 1)]]
        for seed in (11, 12):
            model = form.model(seed)
            run.send(model)
            for _ in range(2):  # the second time from the cache
                assert self.is_right(form, model, prompt)

    def test_f1_a_request_in_flight_is_kept_and_goes_on_with_the_new_weights(self, form, run):
        """F3 too: where the form reports versions, it names both and where they changed."""
        run.receive(mode="keep")
        first, second = form.model(21), form.model(22)
        one = run.send(first).version
        two, running = run.send_during(PROMPTS[0], second)
        answer = running.answer()
        assert (len(answer.tokens), answer.finish_reason) == (LONG, "length")
        if answer.versions is not None:
            assert [label for label, _ in answer.versions] == [str(one), str(two)]
        self.require_switch(form, answer, first, second, PROMPTS[0])

    def test_wait_lets_requests_in_flight_end_with_the_old_weights(self, form, run):
        if "wait" not in form.modes:
            pytest.skip("this form has no mode='wait'")
        run.receive(mode="wait")
        first, second = form.model(31), form.model(32)
        one = run.send(first).version
        _, running = run.send_during(PROMPTS[0], second)
        answer = running.answer()
        assert answer.finish_reason == "length"
        assert [answer.tokens] == form.reference(first, [PROMPTS[0]], LONG)
        assert answer.versions in (None, [(str(one), 0)])
        assert self.is_right(form, second)

    def test_a_mode_that_the_form_lacks_is_refused(self, form, run):
        for mode in {"wait", "abort"} - set(form.modes):
            with pytest.raises(ws.EngineError, match="use mode='keep'"):
                run.receive(mode=mode)

    def test_abort_ends_requests_in_flight_and_says_so(self, form, run):
        if "abort" not in form.modes:
            pytest.skip("this form has no mode='abort'")
        run.receive(mode="abort")
        first, second = form.model(41), form.model(42)
        run.send(first)
        _, running = run.send_during(PROMPTS[0], second, 200)
        answer = running.answer()
        assert answer.finish_reason == "abort"
        count = len(answer.tokens)
        assert 0 < count < 200
        assert [answer.tokens] == form.reference(first, [PROMPTS[0]], count)
        assert self.is_right(form, second)

    def test_a_request_that_comes_during_the_pause_is_queued_and_answered(self, form, run):
        run.receive()
        run.send(form.model(51))
        second = form.model(52)
        started = []
        arrive = at("load", lambda: started.append(form.start(PROMPTS[1])))
        with stepped(run.client, before=arrive):
            two = run.send(second).version
        answer = started[0].answer()
        assert [answer.tokens] == form.reference(second, [PROMPTS[1]], LONG)
        assert answer.versions in (None, [(str(two), 0)])

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda state: state.pop("model.layers.0.self_attn.q_proj.weight"), "q_proj|qkv_proj"),
            (lambda state: state.update({"bogus.weight": torch.zeros(3)}), "bogus"),
        ],
        ids=["partial", "misnamed"],
    )
    def test_an_update_that_does_not_fit_is_refused_untouched(self, form, run, change, words):
        run.receive()
        model, other = form.model(61), form.model(62)
        one = run.send(model).version
        state = dict(other.state_dict())
        change(state)
        with pytest.raises(ws.ReceiverError, match=words):
            run.send(state)
        assert self.is_right(form, model)
        assert run.receiver.status().state == "applied"
        assert form.label() in (None, str(one))
        run.send(other)
        assert self.is_right(form, other)

    @pytest.mark.parametrize(
        ("step", "when"),
        often(
            [(step, when) for step in STEPS if step != "resume" for when in ("before", "after")],
            {("pause", "after"), ("load", "after"), ("finish", "after"), ("label", "before")},
        ),
    )
    def test_a_failure_at_any_step_leaves_a_whole_version(self, form, run, step, when):
        run.receive()
        model = form.model(71)
        one = run.send(model).version
        with (
            stepped(run.client, **{when: at(step, broken)}),
            pytest.raises(ws.ReceiverError, match="injected"),
        ):
            run.send(form.model(72))
        state = run.receiver.status().state
        assert state == ("applied" if step == "pause" else "rolled back")
        assert run.receiver.version == one
        assert form.label() in (None, str(one))
        assert self.is_right(form, model)
        last = form.model(73)
        run.send(last)
        assert self.is_right(form, last)

    @pytest.fixture
    def impatient(self, monkeypatch):
        """What an engine does not do at once is given up soon."""
        for module in ("engine", "pause"):
            monkeypatch.setattr(f"weightsync.engines.vllm.{module}.GRACE", 0.3)

    def test_an_engine_that_does_not_resume_at_once_is_asked_again(self, form, run):
        run.receive()
        model = form.model(75)
        with stepped(run.client, before=at("resume", broken, times=2)):
            run.send(model)
        assert self.is_right(form, model)

    def test_an_engine_that_its_user_paused_stays_paused(self, form, run):
        run.receive()
        run.send(form.model(76))
        run.client.pause("keep", Deadline(WAIT))
        model = form.model(77)
        run.send(model)
        assert run.client.is_paused(Deadline(WAIT))
        run.client.resume(Deadline(WAIT))
        assert self.is_right(form, model)

    def test_one_that_was_not_resumed_is_resumed_by_the_next_update(self, form, run, impatient):
        run.receive()
        run.send(form.model(81))
        with (
            stepped(run.client, before=at("resume", broken, times=10**9)),
            pytest.raises(ws.ReceiverError, match="injected"),
        ):
            run.send(form.model(82))
        with pytest.raises(ws.EngineUnusableError, match="injected"):
            run.receiver.require_ready()
        last = form.model(83)
        run.send(last)
        assert self.is_right(form, last)

    @pytest.mark.parametrize("step", often(STEPS, {"begin", "flush"}))
    def test_what_a_dead_driver_left_open_is_mended_by_the_next_update(
        self, form, run, impatient, step
    ):
        run.receive()
        run.send(form.model(91))
        with stepped(run.client, before=DeadDriver(step)):
            with pytest.raises(ws.ReceiverError, match="the driver is dead"):
                run.send(form.model(92))
            run.stop_receiving()
        run.receive()
        model = form.model(93)
        report = run.send(model)
        assert self.is_right(form, model)
        assert form.label() in (None, str(report.version))

    def test_one_receiver_after_another(self, form, run):
        for seed in (101, 102):
            receiver = run.receive()
            assert receiver.version is None
            model = form.model(seed)
            run.send(model)
            assert self.is_right(form, model)
            run.stop_receiving()
            assert self.is_right(form, model)
