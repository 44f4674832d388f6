from tests.kit import floors

# One of the shipped configs needs packages of ext/.
collect_ignore_glob = [] if floors.WHOLE else ["test_configs.py"]
