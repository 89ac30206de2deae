"""The joint query, which asks about all public volumes at once.

It uses a network trained on public data (the public start) and the tangent kernel of that network. A study asks in one
or more rounds. Each round has a frame: a public centre that is subtracted from the codes, and directions on which they
are projected. The student is the public start, trained further on the labels that follow from the answers.
"""
