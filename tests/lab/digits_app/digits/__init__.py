"""The digits app, with clients that misbehave on command."""
