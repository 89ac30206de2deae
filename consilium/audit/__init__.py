"""``consilium audit``: lives of a study through the production objects, and everything that came out of them tested."""
