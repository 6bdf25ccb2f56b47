"""`python -m support.lone_rank`: a learner rank as it is, but for the replicas, which are not there."""

from polyreme_trainer.learner.__main__ import main
from support.mortal_learner import AloneLearner

if __name__ == "__main__":
    main(AloneLearner)
