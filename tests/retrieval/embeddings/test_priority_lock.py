import threading
import time

from retrieval.embeddings.priority_lock import PriorityLock


def test_a_question_is_next_however_many_batches_wait():
    turns = PriorityLock()
    order = []

    def take(turn, name):
        with turn():
            order.append(name)

    with turns.batch():  # the batch that is being computed
        threads = [threading.Thread(target=take, args=(turns.batch, n)) for n in range(8)]
        threads.append(threading.Thread(target=take, args=(turns.question, "question")))
        for number, thread in enumerate(threads, 1):
            thread.start()
            while len(turns._changed._waiters) < number:  # it has come to wait
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order[0] == "question"
    assert sorted(order[1:]) == list(range(8))


def test_a_document_does_not_go_on_before_a_question_that_waits():
    turns = PriorityLock()
    order = []

    def ask():
        with turns.question():
            order.append("question")

    for number in range(20):  # who has just freed a lock is likely, not certain, to get it again
        with turns.batch():
            asking = threading.Thread(target=ask)
            asking.start()
            while not turns._num_questions:
                time.sleep(0.001)
        with turns.batch():
            order.append("batch")
        asking.join()
        assert order == ["question", "batch"] * (number + 1)


def test_a_turn_that_fails_is_over():
    turns = PriorityLock()
    for turn in (turns.batch, turns.question):
        try:
            with turn():
                raise ValueError
        except ValueError:
            pass
    with turns.batch():
        pass
