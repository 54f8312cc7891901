"""A first step compared with the exact computation: `laconic.audit`.

No relation to laconic.collectives.audit, which records the codecs that collectives chose.
"""

from laconic.auditing.first_step import AuditReport, audit, audit_loss

__all__ = ["AuditReport", "audit", "audit_loss"]
