"""turns.py: who waits gets the lock next."""

import threading

from hfaccel.serve.turns import Turns


def test_who_holds_it_may_enter_again_and_nobody_else():
    lock, inside = Turns(), threading.Event()
    with lock, lock:
        other = threading.Thread(target=lambda: lock.__enter__() and inside.set() or lock.__exit__())
        other.start()
        assert not inside.wait(0.05)
    assert inside.wait(10)
    other.join()


def test_one_that_takes_it_without_a_pause_lets_others_in():
    """threading.RLock would go back to the busy thread thousands of times."""
    lock, stop, rounds = Turns(), threading.Event(), [0]

    def busy():
        while not stop.is_set():
            with lock:
                rounds[0] += 1

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(20):
            with lock:
                pass
    finally:
        stop.set()
        thread.join()
    assert rounds[0] > 0


def test_handed_on_in_the_order_of_asking():
    lock, order, threads = Turns(), [], []

    def ask(number):
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            while len(lock._line) <= number:
                pass
        before = len(order)
    for thread in threads:
        thread.join()
    assert before == 0 and order == list(range(5))


def test_nobody_is_in_twice():
    lock, inside, most = Turns(), [0], [0]

    def work():
        for _ in range(200):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and lock._owner is None and not lock._line
