"""The joint query, which asks about all public volumes at once.

It uses a network trained on public data (the public start) and the tangent kernel of that network. It asks in rounds;
each round's codes are relative to a centre and directions of its own (the frame). The student is the public start,
trained further.
"""
