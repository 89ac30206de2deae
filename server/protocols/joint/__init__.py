"""The joint query, which asks about all public volumes at once.

It consists of a network trained on public data (the start), the tangent kernel of that network, rounds that each ask in
a basis of their own (the frame), and a student that is trained on from the start.

"""
