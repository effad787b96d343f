"""The views that a mesh and SageMaker have of the models."""
