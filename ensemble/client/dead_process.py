# SPDX-License-Identifier: Apache-2.0
"""What Triton says of a Python model's process that is dead or stands still, whatever is sent to it.

By its words alone, because its status, INTERNAL, is that of every other failure too. For the client, which tries again,
and for the launcher, which heals the model.
"""

# In lower case: a message has one of them.
PHRASES = ("is not healthy", "health mutex", "stub process")


def says_dead(message: str) -> bool:
    """Whether a message of Triton says that a model's process is dead."""
    return any(phrase in message.lower() for phrase in PHRASES)
