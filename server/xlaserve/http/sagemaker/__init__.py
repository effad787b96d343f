"""SageMaker's endpoints and bodies."""
