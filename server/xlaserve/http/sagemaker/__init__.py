"""SageMaker's endpoints and request bodies."""
