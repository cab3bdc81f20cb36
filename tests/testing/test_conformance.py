"""The suite notices what it is there for: each defect, by the test that is about it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.testing import broken

HERE = Path(__file__).parent

QUICKLY = {
    "loses NaN payloads": "test_every_bit_arrives[dtypes]",
    "goes by position": "test_the_order_of_a_stream_does_not_matter",
    "publishes what it got": "test_what_cannot_be_sent_changes_nothing[that_breaks-"
    "the disk of the trainer is gone]",
    "forgets receivers=": "test_updates_for_some_of_three",
    "swallows errors": "test_an_update_that_fails_at_a_receiver",
    "overwrites under readers": "test_a_reader_that_is_slow_in_the_middle_of_its_copy",
    "labels before it writes": "test_a_sender_dies_while_it_publishes",
    "waits for ever for a sender": "test_there_is_no_sender",
    "asks for the newest only": "test_how_far_a_receiver_may_be_behind",
    "unpickles": "test_a_stored_file_is_replaced",
    "does not check": "test_a_stored_file_is_damaged[corrupt]",
    "raises raw errors": "test_files_that_must_not_grow",
    "forgets options in its URL": "test_a_url",
    "counts the padding": "test_both_ends_report_the_same",
    "reads in one worker": "test_workers_read_what_their_driver_saw",
}
"""At least one for each part."""

ALL = {
    **QUICKLY,
    "reads memory as it lies": "test_every_bit_arrives[strides]",
    "drops odd bytes": "test_every_bit_arrives[shapes]",
    "holds the whole stream": "test_a_stream_is_never_held_as_a_whole",
    "has a small bucket": "test_a_tensor_larger_than_any_buffer",
    "has a small header": "test_many_small_tensors",
    "sends ties twice": "test_ties_are_sent_once",
    "takes names for files": "test_names_are_names",
    "refuses without a name": "test_dtypes_that_few_can_carry_arrive_or_are_refused",
    "keeps its first model": "test_a_model_may_change",
    "takes any number": "test_numbers_grow",
    "has one epoch": "test_a_sender_that_comes_back_is_newer[killed]",
    "believes the clock": "test_the_clock_goes_back[killed]",
    "begins at step 1": "test_the_first_version_has_any_number",
    "misses what was before": "test_a_receiver_that_comes_late",
    "swallows words": "test_weights_that_do_not_fit_change_nothing",
    "loses what it saw": "test_a_reader_that_is_slow_to_open_what_it_saw",
    "waits for ever for a version": "test_nothing_is_published",
    "waits for ever for receivers": "test_a_receiver_stands_still",
    "knows no receivers": "test_receivers_do_not_come",
    "notices no death": "test_a_receiver_dies_while_it_applies",
    "mourns for ever": "test_a_receiver_dies_in_the_middle_of_a_transfer",
    "is silent about its set-up": "test_a_receiver_cannot_be_set_up",
    "never signs off": "test_a_receiver_signs_off",
    "waits for who has left": "test_a_receiver_goes_to_another_run_and_comes_back",
    "leaves its name taken": "test_a_receiver_comes_back_under_its_name",
    "stays the owner": "test_a_sender_ends_while_receivers_wait",
    "asks for no lock": "test_there_is_one_sender",
    "leaves a thread": "test_programs_end[shutdown]",
    "trips over garbage": "test_a_stored_file_is_damaged[truncate]",
    "trips over permissions": "test_a_file_may_not_be_read",
    "trusts what was left": "test_a_sender_finds_what_somebody_left",
    "unpickles what strangers say": "test_strangers_connect",
    "takes any id": "test_an_id_is_no_path[a/b]",
    "leaves half a file": "test_a_model_that_is_too_big_for_the_disk",
    "maps what is not there": "test_a_disk_that_fills_up",
    "ignores unknown options": "test_an_unknown_option",
    "can be changed": "test_it_does_not_change",
    "connects when it is made": "test_constructing_it_touches_nothing",
    "closes once": "test_closing_twice",
    "counts too many seconds": "test_seconds_add_up",
    "has no pid": "test_receivers_are_listed",
    "says that nothing changed": "test_what_changed_is_counted_or_unknown",
    "reports what cannot be written": "test_a_report_is_plain_values",
    "shows what is not there": "test_a_run_can_be_looked_at",
}


def results(defects, folder):
    """Run the suite's tests on the broken schemes: how each class's one failed, if it did."""
    report = folder / "report.xml"
    nodes = [f"{HERE}/broken.py::{broken.class_name(one)}::{defects[one]}" for one in defects]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *nodes,
        ],
        env={**os.environ, "WEIGHTSYNC_TESTING_WAIT": "3"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    return {
        case.get("classname").rpartition(".")[2]: [child.get("message") for child in case]
        for case in ElementTree.parse(report).iter("testcase")
    }


def require_noticed(messages):
    [message] = messages
    accident = re.search("(Name|Attribute|Import|Fixture)[A-Za-z]*Error|setup", message)
    assert not accident, message


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory):
    return results(QUICKLY, tmp_path_factory.mktemp("quick"))


@pytest.mark.live
@pytest.mark.parametrize("defect", QUICKLY)
def test_a_defect_is_noticed(quick_results, defect):
    require_noticed(quick_results[broken.class_name(defect)])


@pytest.fixture(scope="module")
def all_results(tmp_path_factory):
    return results(ALL, tmp_path_factory.mktemp("all"))


@pytest.mark.slow
@pytest.mark.parametrize("defect", ALL)
def test_every_defect_is_noticed(all_results, defect):
    require_noticed(all_results[broken.class_name(defect)])
