"""Waking up when a file is replaced; and still looking where the kernel says nothing."""

import os
import signal
import threading
import time

import pytest

from weightsync import notice
from weightsync.files import Directory
from weightsync.notice import Notice
from weightsync.testing.processes import eventually

LONG = 20.0


@pytest.fixture
def directory(tmp_path):
    return Directory.open(str(tmp_path / "run"), create=True)


def woken(notice, directory, action):
    """Whether a long wait ended well before its time because of an action during it."""
    began = time.monotonic()
    thread = threading.Timer(0.05, action)
    thread.start()
    notice.wait(directory, LONG)
    thread.join()
    return time.monotonic() - began < LONG / 2


def test_a_wait_ends_when_a_file_is_replaced(directory):
    news = Notice()
    news.wait(directory, LONG)  # the first time it only begins
    assert woken(news, directory, lambda: directory.replace("head.json", b"1"))
    directory.replace("head.json", b"2")
    assert woken(news, directory, lambda: None)  # what came between two waits is not missed


def test_each_piece_of_news_is_told_once(directory):
    news = Notice()
    news.wait(directory, LONG)
    directory.replace("head.json", b"1")
    news.wait(directory, LONG)
    began = time.monotonic()
    news.wait(directory, 0.2)
    assert time.monotonic() - began >= 0.19


def test_another_directory_is_turned_to_at_once(directory, tmp_path):
    news, other = Notice(), Directory.open(str(tmp_path / "other"), create=True)
    news.wait(directory, LONG)
    news.wait(other, LONG)
    assert woken(news, other, lambda: other.replace("head.json", b"1"))


def test_a_directory_that_was_made_anew_is_another_one(directory, tmp_path):
    news = Notice()
    news.wait(directory, LONG)
    os.rename(tmp_path / "run", tmp_path / "former")
    again = Directory.open(str(tmp_path / "run"), create=True)
    news.wait(again, LONG)
    assert woken(news, again, lambda: again.replace("head.json", b"1"))


@pytest.mark.parametrize("why", ["no inotify", "no more of them"])
def test_without_the_kernels_help_it_is_a_pause(directory, monkeypatch, why):
    if why == "no inotify":
        monkeypatch.setattr(notice.ctypes, "CDLL", lambda name: object())
    else:
        monkeypatch.setattr(notice, "_watch", lambda directory: -1)
    news = Notice()
    news.wait(directory, LONG)
    directory.replace("head.json", b"1")
    began = time.monotonic()
    news.wait(directory, 0.05)
    assert time.monotonic() - began >= 0.045


def test_descriptors_are_given_back(directory, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    news = Notice()
    others = [Directory.open(str(tmp_path / str(n)), create=True) for n in range(20)]
    for other in others:
        news.wait(other, LONG)
    assert len(os.listdir("/proc/self/fd")) == before + len(others) + 1
    del news, others, other
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_leaves_its_parents_news_alone(directory):
    news = Notice()
    news.wait(directory, LONG)
    pid = os.fork()
    if pid == 0:
        news.wait(directory, LONG)  # turns to one of its own
        directory.replace("head.json", b"1")
        news.wait(directory, LONG)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert woken(news, directory, lambda: None)


def test_a_child_forked_while_a_thread_waits_does_not_wait_for_that_thread(directory):
    news = Notice()
    news.wait(directory, LONG)
    thread = threading.Thread(target=news.wait, args=(directory, 1.0))
    thread.start()
    eventually(news._using.locked)
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(LONG))
        news.wait(directory, 0.01)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
