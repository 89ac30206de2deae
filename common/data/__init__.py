"""Reading, writing, making and splitting data: nothing here sees a code, a budget or the network."""
