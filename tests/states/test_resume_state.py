"""What a checkpoint brought waits in one place until the first batch."""

from ignite.metrics import Average

from ignite_engine.states.metrics import MetricState
from ignite_engine.states.resume_state import ResumeState


def test_metrics_are_loaded_after_each_reset_until_the_first_batch():
    average = Average()
    average.update(4.0)
    state = MetricState(average)
    resume = ResumeState()
    resume.metrics.append((state, state.state_dict()))
    for _ in range(2):  # at STARTED and EPOCH_STARTED
        average.reset()
        resume.restore_metrics()
        assert average.compute() == 4.0

    resume.saved_grouping, resume.data, resume.rng = True, {"batch": 3}, {"torch": 1}
    resume.clear()
    assert (resume.saved_grouping, resume.data, resume.rng, resume.metrics) == (None, None, None, [])
