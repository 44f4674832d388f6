from tests.kit import floors

# The pages show what all packages of ext/ do.
collect_ignore_glob = [] if floors.WHOLE else ["test_*.py"]
