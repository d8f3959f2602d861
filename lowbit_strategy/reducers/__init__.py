"""The methods: how every rank's gradient becomes their mean."""
