"""The query protocols' classes for sites. They compute the code that a site sends for a query."""
