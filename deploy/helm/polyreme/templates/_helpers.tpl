{{/* polyreme.name (list . COMPONENT): an object's name. */}}
{{- define "polyreme.name" -}}
{{ (index . 0).Release.Name | trunc 40 | trimSuffix "-" }}-{{ index . 1 }}
{{- end }}

{{/* polyreme.selector (list . COMPONENT): the labels that select a component's pods. */}}
{{- define "polyreme.selector" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{/* polyreme.metadata (list . COMPONENT): name and labels of an object. */}}
{{- define "polyreme.metadata" -}}
name: {{ include "polyreme.name" . }}
labels:
  {{- include "polyreme.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: polyreme
{{- end }}

{{/* polyreme.image (list . IMAGE): its reference, by digest where one is given. */}}
{{- define "polyreme.image" -}}
{{- $root := index . 0 }}{{ $image := index $root.Values.images (index . 1) -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Values.device }}{{ end }}
{{- end }}

{{/* polyreme.pod (list . COMPONENT PROFILE): the part of a pod's spec that all pods share. A service called vllm would set
VLLM_PORT=tcp://..., so there are no service links. */}}
{{- define "polyreme.pod" -}}
{{- $root := index . 0 }}{{ $values := get $root.Values (index . 1) -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 0
  fsGroup: 10001
  {{- with $values.seccompProfile }}
  seccompProfile: {type: Localhost, localhostProfile: {{ . }}}
  appArmorProfile: {type: Unconfined} # nodes with AppArmor refuse the sandbox's mounts
  {{- else }}
  seccompProfile: {type: RuntimeDefault}
  {{- end }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* polyreme.template (list . COMPONENT): metadata of a pod template. */}}
{{- define "polyreme.template" -}}
labels:
  {{- include "polyreme.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: polyreme
{{- with (get (index . 0).Values (index . 1)).annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* polyreme.container (list . IMAGE): image and rights of a container. */}}
{{- define "polyreme.container" -}}
image: {{ include "polyreme.image" . }}
imagePullPolicy: {{ (index . 0).Values.images.pullPolicy }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{/* polyreme.key (list . VARIABLE KEY): a variable with a value of the secret, by the name that `secret` gives its key. */}}
{{- define "polyreme.key" -}}
{{- $secret := (index . 0).Values.secret -}}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ $secret.name }}, key: {{ get $secret (index . 2) }}}}
{{- end }}

{{/* polyreme.password .: the variable with Redis' password. */}}
{{- define "polyreme.password" -}}
{{ include "polyreme.key" (list . "POLYREME_REDIS_PASSWORD" "redisPasswordKey") }}
{{- end }}

{{/* polyreme.environment .: the variables of every service. */}}
{{- define "polyreme.environment" -}}
- {name: POLYREME_REDIS, value: {{ include "polyreme.redis" . | quote }}}
- {name: POLYREME_WAIT, value: "86400"}
{{ include "polyreme.password" . }}
{{ include "polyreme.key" (list . "POLYREME_TOKEN" "tokenKey") }}
{{- if .Values.tls.secret }}
- {name: POLYREME_CERTIFICATE, value: /polyreme/tls/certificate.pem}
- {name: POLYREME_KEY, value: /polyreme/tls/key.pem}
{{- end }}
{{- end }}

{{- define "polyreme.redis" -}}
{{- with .Values.redis -}}
{{- if ne .mode "external" -}}
redis://{{ include "polyreme.name" (list $ "redis") }}:6379/0
{{- else -}}
{{ required "redis.url: the URL of the external Redis" .url }}{{ if .caSecret }}{{ ternary "&" "?" (contains "?" .url) }}ssl_ca_certs=/polyreme/redis-ca/ca.crt{{ end }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* polyreme.mounts . and polyreme.volumes .: the secrets that every service mounts. */}}
{{- define "polyreme.mounts" -}}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /polyreme/tls, readOnly: true}
{{- end }}
{{- if and (eq .Values.redis.mode "external") .Values.redis.caSecret }}
- {name: redis-ca, mountPath: /polyreme/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "polyreme.volumes" -}}
{{- if .Values.tls.secret }}
- {name: tls, secret: {secretName: {{ .Values.tls.secret }}, defaultMode: 288}} # 0440
{{- end }}
{{- if and (eq .Values.redis.mode "external") .Values.redis.caSecret }}
- {name: redis-ca, secret: {secretName: {{ .Values.redis.caSecret }}}}
{{- end }}
{{- end }}

{{/* polyreme.resources (list . COMPONENT): requests and limits, with the device's cards. */}}
{{- define "polyreme.resources" -}}
{{- $root := index . 0 }}{{ $values := get $root.Values (index . 1) }}{{ $resources := deepCopy $values.resources -}}
{{- if ne $root.Values.device "cpu" -}}
{{- $card := ternary "nvidia.com/gpu" "huawei.com/Ascend910" (eq $root.Values.device "cuda") -}}
{{- $_ := set $resources.limits $card (toString $values.cards) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* polyreme.http (list . PATH PORT): a probe of an HTTP port, from inside where the port has TLS: kubelet has no certificate. */}}
{{- define "polyreme.http" -}}
{{- if (index . 0).Values.tls.secret -}}
exec: {command: [python3, /usr/local/lib/polyreme/healthy.py, "http://127.0.0.1:{{ index . 2 }}{{ index . 1 }}"]}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: {{ index . 2 }}}
{{- end }}
timeoutSeconds: 5
{{- end }}

{{/* polyreme.probes .: probes of a service, which may wait for a run for any time before it starts. */}}
{{- define "polyreme.probes" -}}
startupProbe:
  {{- include "polyreme.http" (list . "/health" 8080) | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 17280
readinessProbe:
  {{- include "polyreme.http" (list . "/ready" 8080) | nindent 2 }}
  periodSeconds: 5
livenessProbe:
  {{- include "polyreme.http" (list . "/health" 8080) | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* polyreme.claim (list . VOLUME): a volume of a claim of the chart, or of an existing one. */}}
{{- define "polyreme.claim" -}}
{{- $claim := (get (index . 0).Values.storage (index . 1)).claim | default (include "polyreme.name" .) -}}
- {name: {{ index . 1 }}, persistentVolumeClaim: {claimName: {{ $claim }}}}
{{- end }}

{{/* polyreme.memory (list . COMPONENT): the volume of /dev/shm. */}}
{{- define "polyreme.memory" -}}
- {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ (get (index . 0).Values (index . 1)).sharedMemory }}}}
{{- end }}

{{/* polyreme.calls (list . COMPONENT): the service by whose name clients call a component's HTTP port. */}}
{{- define "polyreme.calls" -}}
apiVersion: v1
kind: Service
metadata: {{- include "polyreme.metadata" . | nindent 2 }}
spec:
  selector: {{- include "polyreme.selector" . | nindent 4 }}
  ports:
    - {name: http, port: 8080, targetPort: http}
    {{- if and (eq (index . 1) "serve") (index . 0).Values.serve.agents }}
    - {name: agents, port: 8452, targetPort: agents}
    {{- end }}
{{- end }}

{{/* polyreme.service (list . COMPONENT IMAGE ARGUMENTS): a deployment. Its pods register their addresses in Redis, so `replicas` may be any
number and no Service leads to them. */}}
{{- define "polyreme.service" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}{{ $values := get $root.Values $component -}}
{{- $scaled := ne (dig "autoscaling" "by" "none" $values) "none" -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "polyreme.metadata" . | nindent 2 }}
spec:
  {{- if not $scaled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "polyreme.selector" . | nindent 6 }}
  strategy: {rollingUpdate: {maxSurge: {{ ternary 0 1 (eq $component "rollout") }}, maxUnavailable: 1}}
  template:
    metadata: {{- include "polyreme.template" . | nindent 6 }}
    spec:
      {{- include "polyreme.pod" . | nindent 6 }}
      terminationGracePeriodSeconds: 40
      containers:
        - name: {{ $component }}
          {{- include "polyreme.container" (list $root (index . 2)) | nindent 10 }}
          {{- with index . 3 }}
          args: {{ toJson . }}
          {{- end }}
          env:
            {{- include "polyreme.environment" $root | nindent 12 }}
            {{- if and (eq $component "environment") $values.online }}
            {{- include "polyreme.key" (list $root "POLYREME_ONLINE_KEY" "onlineKey") | nindent 12 }}
            {{- end }}
          ports: [{name: http, containerPort: 8080}{{ if ne $component "gateway" }}, {name: grpc, containerPort: 50051}{{ end }}]
          {{- include "polyreme.probes" $root | nindent 10 }}
          resources: {{- (eq $component "rollout" | ternary (include "polyreme.resources" .) (toYaml $values.resources)) | nindent 12 }}
          {{- $mounts := include "polyreme.mounts" $root }}{{ $volumes := include "polyreme.volumes" $root }}
          {{- if eq $component "rollout" }}
          {{- $mounts = printf "%s\n- {name: shared-memory, mountPath: /dev/shm}" $mounts }}
          {{- $volumes = printf "%s\n%s" $volumes (include "polyreme.memory" .) }}
          {{- end }}
          {{- with trim $mounts }}
          volumeMounts: {{- . | nindent 12 }}
          {{- end }}
      {{- with trim $volumes }}
      volumes: {{- . | nindent 8 }}
      {{- end }}
{{- end }}
