"""What concerns a model as a whole: conversion, hooks, head and loss, modules that come later, the report."""
