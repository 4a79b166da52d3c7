"""A Dynamo graph on its way through the compiler, and the model that it is of."""
