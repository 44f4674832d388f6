"""Objects of a user whose state a checkpoint does not hold, and one whose state it does."""


class Saved:
    name = "saved"

    def __init__(self):
        self.number = 0

    def count(self):
        self.number += 1

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]
