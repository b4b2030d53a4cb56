"""The models that the tests of skips run on: real libraries made tiny, stand-ins for others, and UNets nobody knows."""
