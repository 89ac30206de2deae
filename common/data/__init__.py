"""Reading, writing, making and splitting image data. No module here handles codes, budgets or network messages."""
