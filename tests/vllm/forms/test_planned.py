"""The shared suite on an ``LLM`` whose updates are planned whole, as those on a GPU are.

One request writes a version; with ``stage=True`` out of memory that it was read into while requests
ran.
"""

import pytest

from tests.vllm.forms.suite import EngineSuite
from tests.vllm.forms.test_llm import llm_form, parallel

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400), parallel]


class PlannedSuite(EngineSuite):
    stage = False
    workers = 1

    @pytest.fixture(scope="class")
    def form(self, tmp_path_factory):
        with llm_form(
            tmp_path_factory.mktemp("planned"),
            worker_extension_cls="tests.vllm.plain_worker.Plain",
            tensor_parallel_size=self.workers,
        ) as form:
            form.options = {"apply": "plan", "stage": self.stage}
            yield form

    def test_updates_are_planned_whole(self, form, run):
        """Or the others here would test something else."""
        receiver = run.receive()
        for seed in range(3):
            run.send(form.model(seed))
        notes = receiver.engine.notes()
        assert any("copies by plan" in note for note in notes)
        assert not any("reload" in note for note in notes)
        assert any("written in" in note for note in notes)


class TestPlanned(PlannedSuite):
    pass


class TestStaged(PlannedSuite):
    stage = True


class TestStagedInParts(PlannedSuite):
    stage = True
    workers = 2
