"""What a user needs to unit-test a transform or a step: frames in a line, records compared, the laws as assertions."""

from pipeline.testing.build import frame
from pipeline.testing.compare import assert_records_equal
from pipeline.testing.laws import assert_donation_safe, assert_matches_loop, assert_pure, assert_split_invariant

__all__ = [
    "assert_donation_safe",
    "assert_matches_loop",
    "assert_pure",
    "assert_records_equal",
    "assert_split_invariant",
    "frame",
]
